"""Mistral and Mixtral against transformers, and sliding windows in every family that has them."""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.checkpoint.config import parse_model_config
from engine.errors import UnsupportedModel, WeightsError
from kernels.ops import Ops
from tests.engine.test_llama import LENGTHS, assert_close_to_hf, chunks_of_five, uneven, whole
from tests.engine.test_moe import prefill_then_32_steps
from tests.engine.test_qwen import FIVE_HEADS, LLAMA3, NINE_HEADS, YARN
from tests.engine.tiny import from_hf, tiny_hf

CLASSES: dict[str, tuple[Any, Any]] = {
    "mistral": (MistralForCausalLM, MistralConfig),
    "mixtral": (MixtralForCausalLM, MixtralConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig),
}
WINDOW = {"use_sliding_window": True, "sliding_window": 11}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "mistral, window of 7": ("mistral", {"sliding_window": 7}),
    "mistral, window of 1": ("mistral", {"sliding_window": 1, "head_dim": 32}),
    "mistral, nine heads over three, tied": (
        "mistral",
        NINE_HEADS | {"sliding_window": 20, "tie_word_embeddings": True},
    ),
    "mistral, five heads over one, yarn": (
        "mistral",
        FIVE_HEADS | {"sliding_window": None, "rope_parameters": YARN, "head_dim": 16},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, window of 12, tied": ("mixtral", {"sliding_window": 12, "tie_word_embeddings": True}),
    "mixtral, one expert of five": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 1, "rope_parameters": LLAMA3},
    ),
    "mixtral, nine heads over three": ("mixtral", NINE_HEADS | {"num_experts_per_tok": 3}),
    "mixtral, five heads over one, yarn": (
        "mixtral",
        FIVE_HEADS | {"rope_parameters": YARN, "head_dim": 16},
    ),
    "qwen2, window from the second layer on": ("qwen2", WINDOW | {"max_window_layers": 1}),
    "qwen3, every other layer": (
        "qwen3",
        WINDOW
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 32,
        },
    ),
    "qwen3-moe, all layers": ("qwen3-moe", WINDOW | {"head_dim": 16}),
}


def tiny(family: str, **options: Any) -> PreTrainedModel:
    model_class, config_class = CLASSES[family]
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    defaults: dict[str, Any] = {"mixtral": {"num_local_experts": 8}, "qwen3-moe": experts}
    model: PreTrainedModel = tiny_hf(
        model_class, config_class, **(defaults.get(family, {}) | options)
    )
    return model


@pytest.mark.parametrize(("family", "options"), CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_are_those_of_transformers(
    family: str, options: dict[str, Any], ops: Ops, tmp_path: Path
) -> None:
    hf = tiny(family, **options)
    model = from_hf(hf, tmp_path, ops)
    for take in (whole, chunks_of_five, prefill_then_32_steps, uneven()):
        assert_close_to_hf(model, hf, LENGTHS, take)


def as_json(family: str, **options: Any) -> dict[str, Any]:
    hf = tiny(family, num_hidden_layers=4)
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
