"""Qwen2 and Qwen3 against transformers, however their tokens are scheduled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.checkpoint.config import parse_model_config
from engine.layers.layer import named_weights
from engine.models import build_model
from kernels.ops import Ops, select_ops
from tests.engine.family_configs import QWEN_CONFIGS
from tests.engine.hf_comparison import (
    LENGTHS,
    assert_close_to_hf,
    chunks_of_five,
    prefill_then_32_steps,
    token_by_token,
    uneven,
    whole,
)
from tests.engine.tiny import from_hf
from tests.engine.tiny_families import tiny_family

FAMILIES = ("qwen2", "qwen3")


@pytest.mark.parametrize(("family", "options"), QWEN_CONFIGS.values(), ids=QWEN_CONFIGS.keys())
def test_logits_are_those_of_transformers(
    family: str, options: dict[str, Any], ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_family(family, **options)
    model = from_hf(hf, tmp_path, ops)
    for take in (whole, chunks_of_five, prefill_then_32_steps, uneven()):
        assert_close_to_hf(model, hf, LENGTHS, take)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("take", [whole, token_by_token, prefill_then_32_steps])
def test_a_sequence_alone_has_the_logits_of_transformers(
    take: Callable[[int, int], int], family: str, ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_family(family)
    assert_close_to_hf(from_hf(hf, tmp_path, ops), hf, (70,), take)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_named_as_in_transformers(family: str) -> None:
    hf = tiny_family(family)
    config = parse_model_config(hf.config.to_dict() | {"architectures": [type(hf).__name__]})
    weights = named_weights(build_model(config, select_ops("reference")))
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: parameter.shape for name, parameter in hf.named_parameters()
    }
