"""Weights in fewer bits: quantised when the plain ones are packed, activations stay as they are."""

from torch import Tensor

from engine.config import Quantization
from kernels.ops import GroupedLinear, Linear, Ops

_INT8_MAX = 127


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [..., in] -> (int8 of the same shape, scale [...]) with weight ~ int8 * scale."""
    # A row of zeros has any scale; this one is small enough to stand for none.
    scale = weight.abs().amax(dim=-1).clamp_min(1e-30) / _INT8_MAX
    rounded = (weight / scale[..., None]).round_().clamp_(-_INT8_MAX, _INT8_MAX)
    return rounded.char(), scale


def pack_linear(
    ops: Ops, weight: Tensor, bias: Tensor | None, quantization: Quantization
) -> Linear:
    """weight: [out, in], as float; see `Ops.linear`."""
    if quantization == "none":
        return ops.linear(weight, bias)
    return ops.linear_int8(*quantize_int8(weight), bias)


def pack_grouped_linear(ops: Ops, weight: Tensor, quantization: Quantization) -> GroupedLinear:
    """weight: [groups, out, in], as float; see `Ops.grouped_linear`."""
    if quantization == "none":
        return ops.grouped_linear(weight)
    return ops.grouped_linear_int8(*quantize_int8(weight))
