"""Mixtral and DeepSeek in GGUF files, named as the gguf package names their tensors, with the
metadata that llama.cpp's converter writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from bench.gguf_formats import gguf_writer, write_shape
from engine.errors import UnsupportedModel, WeightsError
from engine.weights import load_model_config
from kernels.ops import Ops, select_ops
from tests.engine.family_configs import DEEPSEEK_YARN
from tests.engine.gguf_files import assert_same_logits, write_gguf
from tests.engine.steps import load
from tests.engine.tiny_families import tiny_deepseek, tiny_family

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
            "rope_parameters": DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "v3": ("v3", _WIDE | {"n_shared_experts": 2}),
    "v3, one group, tied": (
        "v3",
        _WIDE | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "tie_word_embeddings": True},
    ),
}


@pytest.mark.parametrize("quantization", [Type.F32, Type.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("family", "options"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_gguf_file_gives_the_logits_of_transformers(
    family: str, options: dict[str, Any], quantization: Type, ops: Ops, tmp_path: Path
) -> None:
    path = tmp_path / "tiny_family.gguf"
    hf = tiny_family(family, **options) if family == "mixtral" else tiny_deepseek(family, **options)
    write_gguf(path, hf, quantization, is_split=quantization == Type.F32)
    config = load_model_config(path)
    assert config.architecture == type(hf).__name__
    assert config.tie_word_embeddings == hf.config.tie_word_embeddings
    assert_same_logits(path, hf, ops)


def test_another_gating_function_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny_family.gguf"
    with gguf_writer(path, "deepseek2") as writer:
        write_shape(writer, tiny_deepseek("v3").config)
        writer.add_uint32("deepseek2.expert_gating_func", 3)
        writer.add_tensor("token_embd.weight", torch.zeros(96, 64).numpy())
    with pytest.raises(UnsupportedModel, match=r"expert_gating_func is 3 .*supported: 1 \(softmax"):
        load_model_config(path)


def test_half_of_an_up_projection_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny_family.gguf"
    write_gguf(path, tiny_deepseek("v3", **_WIDE), Type.F32, is_split=True)
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_v_b", b"blk.1.attn_w_b"))
    with pytest.raises(WeightsError, match=r"blk\.1\.attn_k_b\.weight, but no attn_v_b"):
        load(path, select_ops("reference"))
