"""Qwen models in GGUF files, named as the gguf package names their tensors."""

from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from engine.weights import load_model_config
from kernels.ops import Ops
from tests.engine.gguf_files import assert_same_logits, write_gguf
from tests.engine.tiny_families import tiny_family

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, tied, one KV head": (
        "qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "qwen3moe": ("qwen3-moe", {"norm_topk_prob": True, "moe_intermediate_size": 32}),
    "qwen3moe, tied, three of nine": (
        "qwen3-moe",
        {
            "norm_topk_prob": True,
            "moe_intermediate_size": 64,
            "tie_word_embeddings": True,
            "num_experts": 9,
            "num_experts_per_tok": 3,
        },
    ),
}


@pytest.mark.parametrize("quantization", [Type.F32, Type.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("family", "options"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_gguf_file_gives_the_logits_of_transformers(
    family: str, options: dict[str, Any], quantization: Type, ops: Ops, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    hf = tiny_family(family, **options)
    write_gguf(path, hf, quantization)
    config = load_model_config(path)
    assert config.architecture == type(hf).__name__
    assert config.tie_word_embeddings == hf.config.tie_word_embeddings
    assert_same_logits(path, hf, ops)
