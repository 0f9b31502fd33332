"""Qwen models in GGUF files, named as the gguf package names their tensors."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants

from engine.weights import load_model_config
from kernels.ops import Ops
from tests.engine.test_qwen import tiny_qwen
from tests.engine.test_weights_gguf import assert_same_logits, gguf_writer, write_metadata

ARCHITECTURES = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, tied, one KV head": (
        "qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
}


def write_qwen(path: Path, family: str, quantization: Type, **options: Any) -> Any:
    """A tiny model as its file, and as transformers has it with the values stored there."""
    hf = tiny_qwen(family, **options)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], hf.config.num_hidden_layers)
    with gguf_writer(path, family) as writer:
        write_metadata(writer, hf)
        if family == "qwen3":
            writer.add_key_length(hf.config.head_dim)
            writer.add_value_length(hf.config.head_dim)
        for name, parameter in hf.named_parameters():
            values = parameter.detach().numpy()
            stored = quantization if values.ndim == 2 else Type.F32
            data = quants.quantize(values, stored)
            parameter.data.copy_(torch.from_numpy(quants.dequantize(data, stored)))
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(target, data, raw_dtype=stored)
    return hf


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
