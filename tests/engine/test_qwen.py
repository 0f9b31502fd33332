"""Qwen2 and Qwen3 against transformers, however their tokens are scheduled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine.checkpoint.config import parse_model_config
from engine.layers.layer import named_weights
from engine.models import build_model
from kernels.ops import Ops, select_ops
from tests.engine.test_llama import (
    LENGTHS,
    assert_close_to_hf,
    chunks_of_five,
    token_by_token,
    uneven,
    whole,
)
from tests.engine.tiny import from_hf, tiny_hf

FAMILIES = {"qwen2": (Qwen2ForCausalLM, Qwen2Config), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
NINE_HEADS = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
FIVE_HEADS = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 gqa": ("qwen2", {}),
    "qwen2 mha, tied": ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen2 nine heads over three": ("qwen2", NINE_HEADS),
    "qwen2 five heads over one, yarn": ("qwen2", FIVE_HEADS | {"rope_parameters": YARN}),
    "qwen2 wide heads, linear": ("qwen2", {"head_dim": 24, "rope_parameters": LINEAR}),
    "qwen2 dynamic": ("qwen2", {"rope_parameters": DYNAMIC}),
    "qwen2 llama3, three layers": ("qwen2", {"rope_parameters": LLAMA3, "num_hidden_layers": 3}),
    "qwen3 gqa": ("qwen3", {"head_dim": 16}),
    "qwen3 default head_dim of 128, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 nine wide heads over three": ("qwen3", NINE_HEADS | {"head_dim": 32}),
    "qwen3 five heads over one, yarn": (
        "qwen3",
        FIVE_HEADS | {"head_dim": 16, "rope_parameters": YARN},
    ),
    "qwen3 mha, biases": (
        "qwen3",
        {"head_dim": 24, "num_key_value_heads": 4, "attention_bias": True},
    ),
    "qwen3 linear": ("qwen3", {"head_dim": 16, "rope_parameters": LINEAR}),
    "qwen3 dynamic": ("qwen3", {"head_dim": 16, "rope_parameters": DYNAMIC}),
    "qwen3 llama3, three layers": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": LLAMA3, "num_hidden_layers": 3},
    ),
}


def prefill_then_32_steps(_: int, left: int) -> int:
    return max(1, left - 32)


def tiny_qwen(family: str, **options: Any) -> Any:
    return tiny_hf(*FAMILIES[family], **options)


@pytest.mark.parametrize(("family", "options"), CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_are_those_of_transformers(
    family: str, options: dict[str, Any], ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_qwen(family, **options)
    model = from_hf(hf, tmp_path, ops)
    for take in (whole, chunks_of_five, prefill_then_32_steps, uneven()):
        assert_close_to_hf(model, hf, LENGTHS, take)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("take", [whole, token_by_token, prefill_then_32_steps])
def test_a_sequence_alone_has_the_logits_of_transformers(
    take: Callable[[int, int], int], family: str, ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_qwen(family)
    assert_close_to_hf(from_hf(hf, tmp_path, ops), hf, (70,), take)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_named_as_in_transformers(family: str) -> None:
    hf = tiny_qwen(family)
    config = parse_model_config(hf.config.to_dict() | {"architectures": [type(hf).__name__]})
    weights = named_weights(build_model(config, select_ops("reference")))
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: parameter.shape for name, parameter in hf.named_parameters()
    }
