"""Weights in fewer bits: quantised when the plain ones are packed.

Whether activations are rounded for their products too is the ops' affair: the CPU's are.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.config import Quantization
from kernels.ops import GroupedLinear, Linear, Ops
from kernels.quantized import QuantizedForm, QuantizedWeight

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


class RoundedRows:
    """Implements `QuantizedRows` for floats: each row is rounded when it is asked for."""

    def __init__(
        self,
        shape: tuple[int, int],
        read: Callable[[slice], Tensor],
        quantization: Quantization,
    ) -> None:
        """read: the rows of a slice, in any floating type. quantization: int8 or int4."""
        self.shape = shape
        self._read = read
        self._round = quantize_int8 if quantization == "int8" else quantize_int4
        self.form = (
            QuantizedForm(shape[1], 8, has_offset=False)
            if quantization == "int8"
            else QuantizedForm(min(INT4_GROUP_SIZE, shape[1]), 4, has_offset=True)
        )

    @classmethod
    def of(cls, weight: Tensor, quantization: Quantization) -> "RoundedRows":
        """weight: [out, in]."""
        num_outputs, num_inputs = weight.shape
        return cls((num_outputs, num_inputs), weight.__getitem__, quantization)

    def rows(self, index: slice) -> QuantizedWeight:
        """Read them and round them."""
        return self._round(self._read(index).float())


def pack_linear(
    ops: Ops, weight: Tensor, bias: Tensor | None, quantization: Quantization
) -> Linear:
    """weight: [out, in], as float; see `Ops.linear`."""
    if quantization in ("int8", "int4"):
        return ops.quantized_linear(RoundedRows.of(weight, quantization), bias)
    return ops.linear(weight, bias)


def vocabulary_rounding(quantization: Quantization) -> Quantization:
    """Never below 8 bits: logits feel each row's error."""
    return "int8" if quantization in ("int8", "int4") else "none"


def pack_vocabulary(ops: Ops, weight: Tensor, quantization: Quantization) -> Linear:
    """weight: [vocab, hidden], as float."""
    rounding = vocabulary_rounding(quantization)
    if rounding == "none":
        return ops.vocabulary(weight)
    return ops.quantized_vocabulary(RoundedRows.of(weight, rounding))


def pack_grouped_linear(ops: Ops, weight: Tensor, quantization: Quantization) -> GroupedLinear:
    """weight: [groups, out, in], as float; see `Ops.grouped_linear`."""
    if quantization in ("int8", "int4"):
        rows = [RoundedRows.of(group, quantization) for group in weight]
        return ops.grouped_quantized_linear(rows)
    return ops.grouped_linear(weight)


def _as_half(factor: Tensor) -> Tensor:
    """Rounded to float16 where it is normal there, or zero."""
    size = factor.abs()
    fits = (size >= _SMALLEST_NORMAL_HALF) & (size <= _LARGEST_HALF)
    return torch.where(fits | (size == 0), factor.half().float(), factor)
