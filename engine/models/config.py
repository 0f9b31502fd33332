"""Hugging Face's config.json as a `ModelConfig`; the one place that knows its spellings."""

import math
from collections.abc import Mapping
from typing import Any, get_args

from engine.architectures import ARCHITECTURES, Architecture
from engine.config import ModelConfig, MoEConfig, RopeConfig, RopeType
from engine.errors import UnsupportedModel, WeightsError

Json = Mapping[str, Any]

SPARSE = frozenset({"Qwen3MoeForCausalLM"})
"""Architectures with experts."""

# What a config without head_dim means, where it is not hidden_size / num_heads.
_HEAD_DIMS = {"Qwen3ForCausalLM": 128}


def parse_model_config(config: Json, generation: Json | None = None) -> ModelConfig:
    """Read config.json and, if there is one, generation_config.json, whose EOS ids are added.

    Raises: UnsupportedModel: an architecture, activation, rope type or quantisation
        that is not built.
        WeightsError: a field is missing or contradicts another.
    """
    generation = generation or {}
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise UnsupportedModel(f"quantised safetensors ({method}) are not supported; use GGUF")
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act is {act!r}, supported: silu")
    _refuse_windows(config)
    architecture = _architecture(config)
    hidden_size, num_heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise WeightsError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    max_position_embeddings = int(config.get("max_position_embeddings", 2048))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_int(config, "intermediate_size"),
        num_layers=_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.get("head_dim") or _HEAD_DIMS.get(architecture, hidden_size // num_heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=parse_rope_config(config, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        moe=parse_moe_config(config) if architecture in SPARSE else None,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_token_ids(config) | _token_ids(generation),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def parse_moe_config(config: Json) -> MoEConfig:
    """Read the experts and which layers have them; transformers 5 writes num_local_experts.

    Raises: WeightsError: a field is missing or contradicts another.
    """
    num_experts = _int(config, "num_experts" if "num_experts" in config else "num_local_experts")
    num_experts_per_tok = _int(config, "num_experts_per_tok")
    if not 1 <= num_experts_per_tok <= num_experts:
        raise WeightsError(f"num_experts_per_tok is {num_experts_per_tok} of {num_experts} experts")
    step = int(config.get("decoder_sparse_step", 1))
    if step < 1:
        raise WeightsError(f"decoder_sparse_step is {step}, must be at least 1")
    dense = frozenset(config.get("mlp_only_layers") or ())
    num_layers = _int(config, "num_hidden_layers")
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=_int(config, "moe_intermediate_size"),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        layers=frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
    )


def parse_rope_config(config: Json, max_position_embeddings: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    scaling: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = _rope_type(scaling)
    partial = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor is {partial}, supported: 1.0")
    original = (
        scaling.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or max_position_embeddings
    )
    factor = scaling.get("factor")
    if factor is None:
        if rope_type in ("linear", "llama3"):
            raise WeightsError(f"rope type {rope_type} needs a factor, there is none")
        factor = max_position_embeddings / original if rope_type == "yarn" else 1.0
    return RopeConfig(
        rope_type=rope_type,
        theta=float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0),
        factor=float(factor),
        original_max_position_embeddings=int(original),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(scaling, factor) if rope_type == "yarn" else 1.0,
        truncate=bool(scaling.get("truncate", True)),
    )


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """By how much yarn scales cos and sin for a stretch of `factor`.

    Source: YaRN (arXiv 2309.00071), section 3.4; mscale is DeepSeek's generalisation.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rope_type(scaling: Json) -> RopeType:
    wanted = scaling.get("rope_type") or scaling.get("type") or "default"
    supported: tuple[RopeType, ...] = get_args(RopeType)
    for rope_type in supported:
        if rope_type == wanted:
            return rope_type
    raise UnsupportedModel(f"rope type is {wanted!r}, supported: {', '.join(supported)}")


def _attention_factor(scaling: Json, factor: float) -> float:
    explicit = scaling.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
    return yarn_attention_factor(factor)


def _refuse_windows(config: Json) -> None:
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if others := sorted(set(layer_types) - {"full_attention"}):
            raise UnsupportedModel(
                f"layer_types has {', '.join(others)}, supported: full_attention"
            )
    elif config.get("use_sliding_window"):
        raise UnsupportedModel("use_sliding_window is true, supported: false (full attention)")


def _architecture(config: Json) -> Architecture:
    architectures = config.get("architectures") or []
    if len(architectures) != 1:
        raise WeightsError(f"config.json names {len(architectures)} architectures, needs one")
    for architecture in ARCHITECTURES:
        if architecture == architectures[0]:
            return architecture
    supported = ", ".join(sorted(ARCHITECTURES))
    raise UnsupportedModel(f"architecture is {architectures[0]}, supported: {supported}")


def _int(config: Json, key: str) -> int:
    if key not in config:
        raise WeightsError(f"config.json has no {key}")
    return int(config[key])


def _token_ids(config: Json) -> frozenset[int]:
    value = config.get("eos_token_id")
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset({value})
