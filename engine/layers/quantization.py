"""Weights in fewer bits: quantised when the plain ones are packed, activations stay as they are."""

import torch
from torch import Tensor

from engine.config import Quantization
from kernels.ops import GroupedLinear, Linear, Ops
from kernels.quantized import QuantizedWeight

INT4_GROUP_SIZE = 32
_INT8_MAX, _INT4_MAX = 127, 15
_ROWS = 2048
_SMALLEST_NORMAL_HALF, _LARGEST_HALF = 2.0**-14, 65504.0


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """weight: [out, in]. One scale per output, symmetric, rounded to nearest."""
    num_outputs, num_inputs = weight.shape
    values = torch.empty(num_outputs, num_inputs, dtype=torch.int8)
    scale = torch.empty(num_outputs, 1)
    # Some rows at a time: numbers on their way take no memory worth mentioning.
    for part, into, scales in zip(
        *(torch.split(t, _ROWS) for t in (weight, values, scale)), strict=True
    ):
        # A row of zeros has any scale; this one is small enough to stand for none.
        scales.copy_(part.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / _INT8_MAX)
        into.copy_((part / scales).round_().clamp_(-_INT8_MAX, _INT8_MAX))
    return QuantizedWeight(values, scale, None, num_inputs, 8)


def quantize_int4(weight: Tensor, group_size: int = INT4_GROUP_SIZE) -> QuantizedWeight:
    """weight: [out, in]. 16 even steps from the smallest to the largest value of each group.

    Scales and offsets are float16 numbers where its range allows.
    """
    num_outputs, num_inputs = weight.shape
    group_size = min(group_size, num_inputs)
    num_groups = -(-num_inputs // group_size)
    # The last group is filled up with its own last value: that changes neither of its ends.
    last = weight[:, -1:].expand(-1, num_groups * group_size - num_inputs)
    groups = torch.cat([weight, last], dim=1).view(num_outputs, num_groups, group_size)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = _as_half(((high - low) / _INT4_MAX).clamp_min(1e-30))
    offset = _as_half(low)
    values = ((groups - offset[..., None]) / scale[..., None]).round_().clamp_(0, _INT4_MAX)
    values = values.char().view(num_outputs, -1)[:, :num_inputs].contiguous()
    return QuantizedWeight(values, scale, offset, group_size, 4)


def pack_linear(
    ops: Ops, weight: Tensor, bias: Tensor | None, quantization: Quantization
) -> Linear:
    """weight: [out, in], as float; see `Ops.linear`."""
    if quantization == "int8":
        return ops.quantized_linear(quantize_int8(weight), bias)
    if quantization == "int4":
        return ops.quantized_linear(quantize_int4(weight), bias)
    return ops.linear(weight, bias)


def pack_vocabulary(ops: Ops, weight: Tensor, quantization: Quantization) -> Linear:
    """weight: [vocab, hidden], as float. Never below 8 bits: logits feel each row's error."""
    if quantization in ("int8", "int4"):
        return ops.quantized_vocabulary(quantize_int8(weight))
    return ops.vocabulary(weight)


def pack_grouped_linear(ops: Ops, weight: Tensor, quantization: Quantization) -> GroupedLinear:
    """weight: [groups, out, in], as float; see `Ops.grouped_linear`."""
    if quantization == "int8":
        return ops.grouped_quantized_linear([quantize_int8(group) for group in weight])
    if quantization == "int4":
        return ops.grouped_quantized_linear([quantize_int4(group) for group in weight])
    return ops.grouped_linear(weight)


def _as_half(factor: Tensor) -> Tensor:
    """Rounded to float16 where it is normal there, or zero."""
    size = factor.abs()
    fits = (size >= _SMALLEST_NORMAL_HALF) & (size <= _LARGEST_HALF)
    return torch.where(fits | (size == 0), factor.half().float(), factor)
