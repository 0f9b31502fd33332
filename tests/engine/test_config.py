import pytest

from engine.architectures import ARCHITECTURES, GGUF_ARCHITECTURES
from engine.checkpoint.config import parse_model_config
from engine.config import RopeConfig
from engine.errors import UnsupportedModel, WeightsError
from engine.models import MODELS

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}


def rope(**options: object) -> RopeConfig:
    return parse_model_config(LLAMA | options).rope


def test_fields_that_a_config_leaves_out_have_the_defaults_of_transformers() -> None:
    config = parse_model_config(LLAMA)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rms_norm_eps, config.rope) == (
        1e-6,
        RopeConfig(original_max_position_embeddings=1024),
    )
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert not config.mlp_bias


def test_null_head_dim_and_kv_heads_are_derived() -> None:
    config = parse_model_config(LLAMA | {"head_dim": None, "num_key_value_heads": None})
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


@pytest.mark.parametrize(
    ("eos", "generation_eos", "expected"),
    [
        (2, None, {2}),
        ([2, 5], None, {2, 5}),
        (2, [7, 8], {2, 7, 8}),
        (None, 9, {9}),
        (None, None, set()),
    ],
)
def test_eos_ids_of_both_files_count(eos: object, generation_eos: object, expected: set) -> None:
    config = parse_model_config(LLAMA | {"eos_token_id": eos}, {"eos_token_id": generation_eos})
    assert config.eos_token_ids == expected


def test_rope_is_read_in_the_spelling_of_either_generation() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    new = rope(rope_parameters=scaling | {"rope_type": "llama3", "rope_theta": 5e5})
    old = rope(rope_scaling=scaling | {"rope_type": "llama3"}, rope_theta=5e5)
    older = rope(rope_scaling=scaling | {"type": "llama3"}, rope_theta=5e5)
    assert new == old == older
    assert (new.rope_type, new.theta, new.factor) == ("llama3", 5e5, 8.0)
    assert new.original_max_position_embeddings == 512


def test_a_null_rope_scaling_means_none() -> None:
    assert rope(rope_scaling=None, rope_theta=1e6).rope_type == "default"
    assert rope(rope_scaling=None, rope_theta=1e6).theta == 1e6


def test_yarn_without_factor_takes_the_ratio_of_the_contexts() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 256}
    assert rope(rope_parameters=scaling).factor == 4.0


@pytest.mark.parametrize("rope_type", ["longrope", "su", "mrope"])
def test_other_rope_types_are_refused_and_the_supported_ones_named(rope_type: str) -> None:
    with pytest.raises(
        UnsupportedModel, match=f"'{rope_type}', supported: default, linear, llama3, yarn"
    ):
        rope(rope_scaling={"rope_type": rope_type, "factor": 2.0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: silu"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_is_not_built_is_refused(options: dict, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_model_config(LLAMA | options)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_a_missing_field_is_named(key: str) -> None:
    with pytest.raises(WeightsError, match=f"has no {key}"):
        parse_model_config({k: v for k, v in LLAMA.items() if k != key})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(WeightsError, match="4 query heads are no multiple of 3 KV heads"):
        parse_model_config(LLAMA | {"num_key_value_heads": 3})


def test_linear_rope_needs_a_factor() -> None:
    with pytest.raises(WeightsError, match="needs a factor"):
        rope(rope_scaling={"rope_type": "linear"})


def test_an_unknown_architecture_is_refused_and_the_supported_ones_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"MambaForCausalLM, supported: .*LlamaForCausalLM"):
        parse_model_config(LLAMA | {"architectures": ["MambaForCausalLM"]})


def test_every_architecture_that_is_promised_can_be_built() -> None:
    assert set(MODELS) == set(ARCHITECTURES)
    assert set(GGUF_ARCHITECTURES.values()) <= set(ARCHITECTURES)
