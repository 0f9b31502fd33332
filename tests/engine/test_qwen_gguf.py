"""Qwen models in GGUF files, named as the gguf package names their tensors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants

from engine.weights import load_model_config
from kernels.ops import Ops
from tests.engine.test_moe import tiny_moe
from tests.engine.test_qwen import tiny_qwen
from tests.engine.test_weights_gguf import assert_same_logits, gguf_writer, write_metadata

ARCHITECTURES = {
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, tied, one KV head": (
        "qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "qwen3moe": ("qwen3moe", {"norm_topk_prob": True, "moe_intermediate_size": 32}),
    "qwen3moe, tied, three of nine": (
        "qwen3moe",
        {
            "norm_topk_prob": True,
            "moe_intermediate_size": 64,
            "tie_word_embeddings": True,
            "num_experts": 9,
            "num_experts_per_tok": 3,
        },
    ),
}


def write_qwen(path: Path, family: str, quantization: Type, **options: Any) -> Any:
    """A tiny model as its file, and as transformers has it with the values stored there."""
    hf = tiny_moe(**options) if family == "qwen3moe" else tiny_qwen(family, **options)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], hf.config.num_hidden_layers)
    with gguf_writer(path, family) as writer:
        write_metadata(writer, hf)
        if family != "qwen2":
            writer.add_key_length(hf.config.head_dim)
            writer.add_value_length(hf.config.head_dim)
        if family == "qwen3moe":
            writer.add_expert_count(hf.config.num_experts)
            writer.add_expert_used_count(hf.config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(hf.config.moe_intermediate_size)
        for name, parameter in named_parts(hf):
            values = parameter.numpy()
            stored = quantization if values.ndim >= 2 else Type.F32
            data = quants.quantize(values, stored)
            parameter.copy_(torch.from_numpy(quants.dequantize(data, stored)))
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(target, data, raw_dtype=stored)
    return hf


def named_parts(hf: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter as a GGUF file has it: gate and up of stacked experts apart."""
    for name, parameter in hf.named_parameters():
        if name.endswith("gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for part, values in zip(("gate", "up"), parameter.detach().chunk(2, 1), strict=True):
                yield f"{stem}{part}_proj.weight", values
        else:
            is_stacked = name.endswith("experts.down_proj")
            yield name + (".weight" if is_stacked else ""), parameter.detach()


@pytest.mark.parametrize("quantization", [Type.F32, Type.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("family", "options"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_gguf_file_gives_the_logits_of_transformers(
    family: str, options: dict[str, Any], quantization: Type, ops: Ops, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    hf = write_qwen(path, family, quantization, **options)
    config = load_model_config(path)
    assert config.architecture == type(hf).__name__
    assert config.tie_word_embeddings == hf.config.tie_word_embeddings
    assert_same_logits(path, hf, ops)
