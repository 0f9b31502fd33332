"""Quantised safetensors: several stored tensors that together are one weight.

config.json: quantization_config      -> Scheme -> combine: stem.qweight, ... -> stem.weight
quant_model_description.json (Ascend)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.errors import UnsupportedModel, WeightsError
from engine.weights import packing
from engine.weights.source import SourceTensor
from kernels.quantized import QuantizedWeight

DESCRIPTION = "quant_model_description.json"
METHODS = ("fp8", "awq", "gptq", "compressed-tensors")
_MODELSLIM = ("W8A8", "W8A8_DYNAMIC")
_AWQ = ("qweight", "qzeros", "scales")
# What these formats store beside the weights for int8 activations; ours stay in float.
_ACTIVATIONS = ("input_scale", "input_offset", "deq_scale", "quant_bias", "input_zero_point")

Json = Mapping[str, Any]
Parts = Mapping[str, SourceTensor]


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


def combine(tensors: Sequence[SourceTensor], scheme: Scheme) -> list[SourceTensor]:
    """Replace the stored tensors of each quantised weight by the weight.

    Raises: WeightsError: a tensor that belongs to a weight is missing, or has another shape.
    """
    stems: dict[str, dict[str, SourceTensor]] = {}
    for tensor in tensors:
        stem, _, kind = tensor.name.rpartition(".")
        stems.setdefault(stem, {})[kind] = tensor
    combined: list[SourceTensor] = []
    for stem, parts in stems.items():
        combined += _COMBINE[scheme.method](stem, parts, scheme)
    return combined


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


def _fp8(stem: str, parts: Parts, scheme: Scheme) -> list[SourceTensor]:
    if "weight_scale_inv" not in parts:
        return list(parts.values())
    weight, scale = _need(stem, parts, "weight"), parts["weight_scale_inv"]
    rows, columns = scheme.block
    wanted = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    _check_shape(scale, wanted, weight)

    def read() -> Tensor:
        return packing.dequantize_blocks(weight.read(), scale.read(), scheme.block)

    return _instead(
        parts, {"weight", "weight_scale_inv"}, SourceTensor(weight.name, weight.shape, read)
    )


def _words(stem: str, parts: Parts, scheme: Scheme) -> list[SourceTensor]:
    """AWQ and GPTQ."""
    if "qweight" not in parts:
        return list(parts.values())
    qweight, qzeros, scales = (_need(stem, parts, kind) for kind in _AWQ)
    per_word = 32 // scheme.num_bits
    num_inputs, num_outputs = qweight.shape
    if scheme.method == "awq":
        num_outputs *= per_word
    else:
        num_inputs *= per_word
    size = scheme.group_size if scheme.group_size > 0 else num_inputs
    num_groups = -(-num_inputs // size)
    _check_shape(scales, (num_groups, num_outputs), qweight)
    _check_shape(qzeros, (num_groups, num_outputs // per_word), qweight)

    def tensors() -> tuple[Tensor, Tensor, Tensor]:
        return qweight.read(), qzeros.read(), scales.read()

    if scheme.method == "awq":

        def read_quantized() -> QuantizedWeight:
            return packing.read_awq(*tensors())

    else:
        g_idx = parts.get("g_idx")
        groups = torch.arange(num_inputs) // size
        if g_idx is not None:
            _check_shape(g_idx, (num_inputs,), qweight)
            groups = g_idx.read().long()
        # Inputs of a group that are no neighbours: only dequantised.
        is_ordered = bool((groups == torch.arange(num_inputs) // size).all())
        if not is_ordered:
            read = partial(_read_unordered, tensors, groups, scheme)
            return _instead(
                parts,
                {*_AWQ, "g_idx"},
                SourceTensor(f"{stem}.weight", (num_outputs, num_inputs), read),
            )

        def read_quantized() -> QuantizedWeight:
            return packing.read_gptq(
                *tensors(), num_bits=scheme.num_bits, zero_bias=scheme.zero_bias
            )

    whole = _quantized_source(f"{stem}.weight", (num_outputs, num_inputs), read_quantized)
    if size % 8 and num_groups > 1:
        whole = replace(whole, read_quantized=None)
    return _instead(parts, {*_AWQ, "g_idx"}, whole)


def _read_unordered(
    tensors: Callable[[], tuple[Tensor, Tensor, Tensor]], groups: Tensor, scheme: Scheme
) -> Tensor:
    return packing.dequantize_gptq(
        *tensors(), groups, num_bits=scheme.num_bits, zero_bias=scheme.zero_bias
    )


def _int8(stem: str, parts: Parts, scheme: Scheme) -> list[SourceTensor]:
    """compressed-tensors and ModelSlim."""
    is_int8 = "weight_scale" in parts
    if scheme.method == "modelslim":
        is_int8 = f"{stem}.weight" in scheme.int8_weights
    if not is_int8:
        return list(parts.values())
    weight, scale = _need(stem, parts, "weight"), _need(stem, parts, "weight_scale")
    offset = parts.get("weight_offset")
    for numbers in (scale, offset):
        if numbers is not None and numbers.shape not in ((1,), (), (weight.shape[0],)):
            _check_shape(numbers, (weight.shape[0], 1), weight)

    def read() -> QuantizedWeight:
        shift = None if offset is None else offset.read()
        return packing.read_int8(weight.read(), scale.read(), shift)

    used = {"weight", "weight_scale", "weight_offset", *_ACTIVATIONS}
    return _instead(parts, used, _quantized_source(weight.name, weight.shape, read))


_COMBINE = {
    "fp8": _fp8,
    "awq": _words,
    "gptq": _words,
    "compressed-tensors": _int8,
    "modelslim": _int8,
}


def _quantized_source(
    name: str, shape: tuple[int, ...], read: Callable[[], QuantizedWeight]
) -> SourceTensor:
    return SourceTensor(name, shape, lambda: read().dequantize(), read_quantized=read)


def _instead(parts: Parts, used: set[str], whole: SourceTensor) -> list[SourceTensor]:
    return [*(part for kind, part in parts.items() if kind not in used), whole]


def _need(stem: str, parts: Parts, kind: str) -> SourceTensor:
    if kind not in parts:
        held = ", ".join(f"{stem}.{name}" for name in sorted(parts))
        raise WeightsError(f"there is no {stem}.{kind} beside {held}")
    return parts[kind]


def _check_shape(tensor: SourceTensor, wanted: tuple[int, ...], beside: SourceTensor) -> None:
    if tensor.shape != wanted:
        raise WeightsError(
            f"{tensor.name} has shape {list(tensor.shape)}, must have {list(wanted)} beside "
            f"{beside.name} {list(beside.shape)}"
        )
