"""Mixtral and DeepSeek in GGUF files, named as the gguf package names their tensors, with the
metadata that llama.cpp's converter writes."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from torch import Tensor

from engine.errors import UnsupportedModel, WeightsError
from engine.weights import load_model_config
from kernels.ops import Ops, select_ops
from tests.engine.steps import load
from tests.engine.test_deepseek import YARN, tiny_deepseek
from tests.engine.test_mistral import tiny
from tests.engine.test_qwen_gguf import named_parts
from tests.engine.test_weights_gguf import (
    assert_same_logits,
    gguf_writer,
    pairs_from_halves,
    write_metadata,
)

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "deepseek2": gguf.MODEL_ARCH.DEEPSEEK2}
_WIDE = {"moe_intermediate_size": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 24}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 8}),
    "mixtral, three of five, tied": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
    "v2 without q_lora": ("v2", _WIDE | {"q_lora_rank": None, "topk_method": "greedy"}),
    "v2, groups, yarn with mscale": (
        "v2",
        _WIDE
        | {
            "q_lora_rank": 32,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "v3": ("v3", _WIDE | {"n_shared_experts": 2}),
    "v3, one group, tied": (
        "v3",
        _WIDE | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "tie_word_embeddings": True},
    ),
}


def write_latent_metadata(writer: gguf.GGUFWriter, config: Any, *, is_split: bool) -> None:
    """As the converter does; is_split: since it takes kv_b_proj apart."""
    head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if is_split:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(head_dim)
        writer.add_value_length_mla(config.v_head_dim)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(config.v_head_dim)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    is_v3 = "V3" in type(config).__name__
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if is_v3 else kinds.SOFTMAX)
    writer.add_expert_weights_norm(is_v3 and config.norm_topk_prob)
    if is_v3 or config.topk_method != "greedy":
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def split_up_projection(config: Any, weight: Tensor) -> dict[str, Tensor]:
    """kv_b_proj as the converter takes it apart."""
    heads = weight.view(config.num_attention_heads, -1, weight.shape[1])
    k, v = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return {"k_b_proj": k.transpose(1, 2), "v_b_proj": v}


@torch.no_grad()
def write(path: Path, family: str, quantization: Type, *, is_split: bool, **options: Any) -> Any:
    """A tiny model as its file, and as transformers has it with the values stored there."""
    architecture = "llama" if family == "mixtral" else "deepseek2"
    hf = tiny("mixtral", **options) if family == "mixtral" else tiny_deepseek(family, **options)
    config = hf.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def add(name: str, values: Tensor) -> Tensor:
        fits = values.dim() >= 2 and values.shape[-1] % 32 == 0
        stored = quantization if fits else Type.F32
        data = quants.quantize(values.contiguous().numpy(), stored)
        kept = torch.from_numpy(quants.dequantize(data, stored))
        projection = name.split(".")[-2] if name.endswith(".weight") else ""
        if architecture == "llama" and projection in heads:
            data = pairs_from_halves(data, heads[projection])
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, data, raw_dtype=stored)
        return kept

    with gguf_writer(path, architecture) as writer:
        write_metadata(writer, hf)
        if family == "mixtral":
            writer.add_expert_count(config.num_local_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
        else:
            write_latent_metadata(writer, config, is_split=is_split)
        for name, parameter in named_parts(hf):
            if is_split and "kv_b_proj" in name:
                kept = {
                    part: add(name.replace("kv_b_proj", part), values)
                    for part, values in split_up_projection(config, parameter).items()
                }
                both = torch.cat([kept["k_b_proj"].transpose(1, 2), kept["v_b_proj"]], dim=1)
                parameter.copy_(both.flatten(0, 1))
            else:
                parameter.copy_(add(name, parameter))
        for name, buffer in hf.named_buffers():
            if name.endswith("e_score_correction_bias"):
                add(name.replace("_correction_bias", "_correction.bias"), buffer)
    return hf


@pytest.mark.parametrize("quantization", [Type.F32, Type.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("family", "options"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_gguf_file_gives_the_logits_of_transformers(
    family: str, options: dict[str, Any], quantization: Type, ops: Ops, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    hf = write(path, family, quantization, is_split=quantization == Type.F32, **options)
    config = load_model_config(path)
    assert config.architecture == type(hf).__name__
    assert config.tie_word_embeddings == hf.config.tie_word_embeddings
    assert_same_logits(path, hf, ops)


def test_another_gating_function_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    with gguf_writer(path, "deepseek2") as writer:
        write_metadata(writer, tiny_deepseek("v3"))
        writer.add_uint32("deepseek2.expert_gating_func", 3)
        writer.add_tensor("token_embd.weight", torch.zeros(96, 64).numpy())
    with pytest.raises(UnsupportedModel, match=r"expert_gating_func is 3 .*supported: 1 \(softmax"):
        load_model_config(path)


def test_half_of_an_up_projection_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "v3", Type.F32, is_split=True, **_WIDE)
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_v_b", b"blk.1.attn_w_b"))
    with pytest.raises(WeightsError, match=r"blk\.1\.attn_k_b\.weight, but no attn_v_b"):
        load(path, select_ops("reference"))
