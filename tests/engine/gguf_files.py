"""Tiny models of every family as GGUF files, with what llama.cpp's converter writes in them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from bench.gguf_formats import gguf_writer, round_to, write_shape
from kernels.ops import Ops
from tests.engine.hf_comparison import LOGIT_TOLERANCE
from tests.engine.tiny import (
    PoisonedCache,
    hf_logits,
    load,
    logits_by_steps,
    random_token_ids,
    tiny_hf_llama,
)

ARCHITECTURES: dict[str, tuple[str, gguf.MODEL_ARCH]] = {
    "LlamaForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "MixtralForCausalLM": ("llama", gguf.MODEL_ARCH.LLAMA),
    "Qwen2ForCausalLM": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "Qwen3ForCausalLM": ("qwen3", gguf.MODEL_ARCH.QWEN3),
    "Qwen3MoeForCausalLM": ("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE),
    "DeepseekV2ForCausalLM": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "DeepseekV3ForCausalLM": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
}


def pairs_from_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """What the converter does to q and k, written independently of the loader."""
    head_dim = rows.shape[0] // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + i
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


def write_metadata(writer: gguf.GGUFWriter, hf: PreTrainedModel, *, is_split: bool = False) -> None:
    """is_split: as the converter does since it takes kv_b_proj apart."""
    config: Any = hf.config
    write_shape(writer, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    match ARCHITECTURES[type(hf).__name__][0]:
        case "deepseek2":
            _write_latent_metadata(writer, config, is_split=is_split)
        case "qwen3" | "qwen3moe":
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
    if "Moe" in type(hf).__name__ or "Mixtral" in type(hf).__name__:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if "Moe" in type(hf).__name__:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


@torch.no_grad()
def write_tensors(
    writer: gguf.GGUFWriter, hf: PreTrainedModel, quantization: Type, *, is_split: bool = False
) -> None:
    """Store the weights, and put what was stored into `hf`, so that both models have the same."""
    config: Any = hf.config
    arch, model_arch = ARCHITECTURES[type(hf).__name__]
    names = gguf.get_tensor_name_map(model_arch, config.num_hidden_layers)
    block_size, _ = gguf.GGML_QUANT_SIZES[quantization]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def add(name: str, values: Tensor) -> Tensor:
        fits = values.dim() >= 2 and values.shape[-1] % max(32, block_size) == 0
        stored = quantization if fits else Type.F32
        data = round_to(values.contiguous().numpy(), stored)
        kept = torch.from_numpy(quants.dequantize(data, stored))
        for projection, num_heads in heads.items() if arch == "llama" else ():
            if f".{projection}." in name:
                data = pairs_from_halves(data, num_heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, data, raw_dtype=stored)
        return kept

    for name, parameter in _named_parts(hf):
        if is_split and "kv_b_proj" in name:
            kept = {
                part: add(name.replace("kv_b_proj", part), values)
                for part, values in _split_up_projection(config, parameter).items()
            }
            both = torch.cat([kept["k_b_proj"].transpose(1, 2), kept["v_b_proj"]], dim=1)
            parameter.copy_(both.flatten(0, 1))
        else:
            parameter.copy_(add(name, parameter))
    for name, buffer in hf.named_buffers():
        if name.endswith("e_score_correction_bias"):
            add(name.replace("_correction_bias", "_correction.bias"), buffer)


def write_gguf(
    path: Path, hf: PreTrainedModel, quantization: Type, *, is_split: bool = False
) -> None:
    """The model as a file; its weights become those that are stored there."""
    with gguf_writer(path, ARCHITECTURES[type(hf).__name__][0]) as writer:
        write_metadata(writer, hf, is_split=is_split)
        write_tensors(writer, hf, quantization, is_split=is_split)


def tiny_gguf(path: Path, quantization: Type = Type.F32, **options: Any) -> LlamaForCausalLM:
    hf = tiny_hf_llama(**options)
    write_gguf(path, hf, quantization)
    return hf


def assert_same_logits(path: Path, hf: PreTrainedModel, ops: Ops) -> None:
    model = load(path, ops)
    token_ids = random_token_ids(40, 0)
    cache = PoisonedCache(model, num_blocks=8, block_size=8)
    (logits,) = logits_by_steps(model, cache, [token_ids], lambda _, left: left)
    torch.testing.assert_close(logits, hf_logits(hf, token_ids), rtol=0, atol=LOGIT_TOLERANCE)


def _write_latent_metadata(writer: gguf.GGUFWriter, config: Any, *, is_split: bool) -> None:
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


def _split_up_projection(config: Any, weight: Tensor) -> dict[str, Tensor]:
    """kv_b_proj as the converter takes it apart."""
    heads = weight.view(config.num_attention_heads, -1, weight.shape[1])
    k, v = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return {"k_b_proj": k.transpose(1, 2), "v_b_proj": v}


def _named_parts(hf: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as a GGUF file has it: gate and up of stacked experts apart."""
    for name, parameter in hf.named_parameters():
        if name.endswith("gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for part, values in zip(("gate", "up"), parameter.detach().chunk(2, 1), strict=True):
                yield f"{stem}{part}_proj.weight", values
        else:
            is_stacked = name.endswith("experts.down_proj")
            yield name + (".weight" if is_stacked else ""), parameter.detach()
