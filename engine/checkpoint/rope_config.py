"""Rotary position embedding in a config.json."""

import math
from typing import get_args

from engine.checkpoint.fields import Json
from engine.config import RopeConfig, RopeType
from engine.errors import UnsupportedModel, WeightsError

_DYNAMIC = "dynamic"


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
    if wanted == _DYNAMIC:
        # It stretches by as much as a text is longer than max_position_embeddings: none is here.
        return "default"
    supported: tuple[RopeType, ...] = get_args(RopeType)
    for rope_type in supported:
        if rope_type == wanted:
            return rope_type
    names = ", ".join([*supported, _DYNAMIC])
    raise UnsupportedModel(f"rope type is {wanted!r}, supported: {names}")


def _attention_factor(scaling: Json, factor: float) -> float:
    explicit = scaling.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
    return yarn_attention_factor(factor)
