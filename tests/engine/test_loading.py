"""Loading keeps few layers in both forms at a time."""

from pathlib import Path

import pytest
from torch import nn

from engine.errors import WeightsError
from engine.layers.linear import FusedLinear
from engine.models import build_model
from engine.weights import load_model_config, load_weights
from kernels.ops import select_ops
from tests.engine.test_qwen import tiny_qwen


def num_packed(model: nn.Module) -> int:
    count = 0
    for layer in model.modules():
        if isinstance(layer, FusedLinear):
            try:
                list(layer.weights())
            except AssertionError:
                count += 1
    return count


def test_a_layer_is_packed_as_soon_as_it_is_filled(tmp_path: Path) -> None:
    tiny_qwen("qwen2", num_hidden_layers=6).save_pretrained(tmp_path)
    model = build_model(load_model_config(tmp_path), select_ops("reference"))
    assert num_packed(model) == 0
    seen: list[int] = []
    load_weights(tmp_path, model, lambda done, total: seen.append(num_packed(model)), num_threads=1)
    # Of embedding, head, 13 norms and 24 projections, at most the former are done before.
    assert all(packed >= calls - 15 for calls, packed in enumerate(seen, start=1))
    assert seen[-1] == 24


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    tiny_qwen("qwen3").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    model = build_model(load_model_config(tmp_path), select_ops("reference"))
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged"):
        load_weights(tmp_path, model)
