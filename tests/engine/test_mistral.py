"""Mistral and Mixtral against transformers, and sliding windows in every family that has them."""

from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.config import parse_model_config
from engine.errors import UnsupportedModel, WeightsError
from kernels.ops import Ops
from tests.engine.family_configs import WINDOW_CONFIGS
from tests.engine.hf_comparison import (
    LENGTHS,
    assert_close_to_hf,
    chunks_of_five,
    prefill_then_32_steps,
    uneven,
    whole,
)
from tests.engine.tiny import from_hf
from tests.engine.tiny_families import tiny_family


@pytest.mark.parametrize(("family", "options"), WINDOW_CONFIGS.values(), ids=WINDOW_CONFIGS.keys())
def test_logits_are_those_of_transformers(
    family: str, options: dict[str, Any], ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_family(family, **options)
    model = from_hf(hf, tmp_path, ops)
    for take in (whole, chunks_of_five, prefill_then_32_steps, uneven()):
        assert_close_to_hf(model, hf, LENGTHS, take)


def as_json(family: str, **options: Any) -> dict[str, Any]:
    hf = tiny_family(family, num_hidden_layers=4)
    return hf.config.to_dict() | {"architectures": [type(hf).__name__]} | options


def test_files_from_before_layer_types_say_the_same() -> None:
    config = as_json("qwen2", sliding_window=8, max_window_layers=2)
    del config["layer_types"]
    assert parse_model_config(config).window_layers == frozenset()
    parsed = parse_model_config(config | {"use_sliding_window": True})
    assert parsed.window_layers == {2, 3}
    assert [parsed.window(layer_idx) for layer_idx in range(4)] == [0, 0, 8, 8]


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        (
            "Qwen2ForCausalLM",
            {"layer_types": ["full_attention", "chunked_attention"] * 2},
            "layer_types has chunked_attention, supported: full_attention, sliding_attention",
        ),
        (
            "LlamaForCausalLM",
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types has sliding_attention, supported for LlamaForCausalLM: full_attention",
        ),
    ],
)
def test_windows_that_are_not_built_are_refused(
    architecture: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_model_config(as_json("qwen2", architectures=[architecture], **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0, must be at least 1"),
        ({"sliding_window": None}, "config.json has no sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has 1 entries for 4 layers"),
    ],
)
def test_windows_that_contradict_each_other_are_named(
    options: dict[str, Any], message: str
) -> None:
    config = as_json("qwen2", layer_types=["sliding_attention"] * 4, sliding_window=4)
    with pytest.raises(WeightsError, match=message):
        parse_model_config(config | options)
