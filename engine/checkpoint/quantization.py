"""How a checkpoint says that its weights are quantised.

config.json: quantization_config, or quant_model_description.json (Ascend)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import UnsupportedModel

DESCRIPTION = "quant_model_description.json"
METHODS = ("fp8", "awq", "gptq", "compressed-tensors")
_MODELSLIM = ("W8A8", "W8A8_DYNAMIC")

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint holds its quantised weights."""

    method: str
    """One of METHODS, or modelslim."""
    num_bits: int = 8
    """Of gptq."""
    group_size: int = -1
    """Of awq and gptq: inputs that share a scale; -1 for all."""
    zero_bias: int = 0
    """Of gptq: zero points are stored less this."""
    block: tuple[int, int] = (128, 128)
    """Of fp8: rows and columns that share a scale."""
    int8_weights: frozenset[str] = frozenset()
    """Of modelslim: which tensors are int8."""


def read_scheme(quantization_config: Json | None, description: Json | None) -> Scheme | None:
    """The scheme that a checkpoint's files state; None: its weights are floats.

    Raises: UnsupportedModel: a method, or a setting of it, that is not built.
    """
    if description is not None:
        return _modelslim(description)
    if not quantization_config:
        return None
    method = quantization_config.get("quant_method")
    if method == "fp8":
        block = quantization_config.get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2:
            raise UnsupportedModel(f"fp8 with weight_block_size {block}, supported: two sizes")
        return Scheme("fp8", block=(int(block[0]), int(block[1])))
    if method in ("awq", "gptq"):
        return _int4(method, quantization_config)
    if method == "compressed-tensors":
        return _compressed(quantization_config)
    raise UnsupportedModel(f"quant_method is {method!r}, supported: {', '.join(METHODS)}")


def _int4(method: str, config: Json) -> Scheme:
    bits = int(config.get("bits", 4))
    allowed = (4,) if method == "awq" else (4, 8)
    if bits not in allowed:
        raise UnsupportedModel(f"{method} with {bits} bits, supported: {allowed}")
    if method == "awq" and str(config.get("version", "gemm")).lower() != "gemm":
        raise UnsupportedModel(f"awq version is {config['version']!r}, supported: gemm")
    is_second = config.get("checkpoint_format") == "gptq_v2"
    zero_bias = 0 if method == "awq" or is_second else 1
    return Scheme(method, bits, int(config.get("group_size", -1)), zero_bias)


def _compressed(config: Json) -> Scheme:
    groups = config.get("config_groups") or {}
    for name, group in groups.items():
        weights = group.get("weights") or {}
        form = (weights.get("num_bits"), weights.get("type"), weights.get("strategy"))
        if form not in ((8, "int", "channel"), (8, "int", "tensor")):
            raise UnsupportedModel(
                f"compressed-tensors {name} has weights of (num_bits, type, strategy) {form}, "
                "supported: 8, int, channel or tensor"
            )
    return Scheme("compressed-tensors")


def _modelslim(description: Json) -> Scheme | None:
    kinds = {name: str(kind) for name, kind in description.items() if name.endswith(".weight")}
    if unknown := sorted(set(kinds.values()) - {"FLOAT", *_MODELSLIM}):
        raise UnsupportedModel(
            f"{DESCRIPTION} has {', '.join(unknown)}, supported: FLOAT, {', '.join(_MODELSLIM)}"
        )
    int8 = frozenset(name for name, kind in kinds.items() if kind in _MODELSLIM)
    return Scheme("modelslim", int8_weights=int8) if int8 else None
