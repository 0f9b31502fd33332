"""Quantised safetensors: several stored tensors that together are one weight.

Scheme -> combine: stem.qweight, stem.qzeros, stem.scales -> stem.weight
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.checkpoint.quantization import Scheme
from engine.errors import WeightsError
from engine.weights import packing
from engine.weights.source import Index, SourceTensor
from kernels.quantized import QuantizedForm, QuantizedWeight

_AWQ = ("qweight", "qzeros", "scales")
# What these formats store beside the weights for int8 activations; ours, where they are rounded,
# are so by their own largest.
_ACTIVATIONS = ("input_scale", "input_offset", "deq_scale", "quant_bias", "input_zero_point")

Parts = Mapping[str, SourceTensor]


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


def _fp8(stem: str, parts: Parts, scheme: Scheme) -> list[SourceTensor]:
    if "weight_scale_inv" not in parts:
        return list(parts.values())
    weight, scale = _need(stem, parts, "weight"), parts["weight_scale_inv"]
    sizes = scheme.block
    wanted = (-(-weight.shape[0] // sizes[0]), -(-weight.shape[1] // sizes[1]))
    _check_shape(scale, wanted, weight)

    def read(index: Index) -> Tensor:
        blocks = tuple(
            slice(part.start // size, -(-part.stop // size))
            for part, size in zip(index, sizes, strict=True)
        )
        first = (index[0].start % sizes[0], index[1].start % sizes[1])
        return packing.dequantize_blocks(weight.read(index), scale.read(blocks), sizes, first)

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
    size = min(scheme.group_size, num_inputs) if scheme.group_size > 0 else num_inputs
    num_groups = -(-num_inputs // size)
    _check_shape(scales, (num_groups, num_outputs), qweight)
    _check_shape(qzeros, (num_groups, num_outputs // per_word), qweight)
    g_idx, groups = parts.get("g_idx"), None
    if g_idx is not None and scheme.method == "gptq":
        _check_shape(g_idx, (num_inputs,), qweight)
        groups = g_idx.whole().long()
        if torch.equal(groups, torch.arange(num_inputs) // size):
            groups = None
    words = _Words(qweight, qzeros, scales, scheme, size, (num_outputs, num_inputs), groups)
    whole = SourceTensor(f"{stem}.weight", words.shape, words.read)
    if groups is None and (size % 8 == 0 or num_groups == 1):
        form = QuantizedForm(size, scheme.num_bits, has_offset=True)
        whole = replace(whole, form=form, read_quantized=words.read_quantized)
    return _instead(parts, {*_AWQ, "g_idx"}, whole)


@dataclass(frozen=True, slots=True)
class _Words:
    """One weight of AWQ or GPTQ."""

    qweight: SourceTensor
    qzeros: SourceTensor
    scales: SourceTensor
    scheme: Scheme
    size: int
    """Of a group."""
    shape: tuple[int, int]
    groups: Tensor | None
    """[in]: the group of each input; None: those of a group are neighbours."""

    def read(self, index: Index) -> Tensor:
        """Dequantised."""
        if self.groups is not None:
            return self._read_unordered(index, self.groups)
        weight, skipped = self._read_whole_groups(index)
        return weight.dequantize()[:, skipped : skipped + index[1].stop - index[1].start]

    def read_quantized(self, index: Index) -> QuantizedWeight:
        """See `SourceTensor.read_quantized`."""
        weight, skipped = self._read_whole_groups(index)
        part = weight.columns(skipped, skipped + index[1].stop - index[1].start)
        assert part is not None, "the columns are whole groups"
        return part

    def _read_whole_groups(self, index: Index) -> tuple[QuantizedWeight, int]:
        """The rows asked for, of all groups that the columns are in; how many come before."""
        num_outputs, num_inputs = self.shape
        is_one_group = self.size == num_inputs
        unit = math.lcm(self._per_word, 1 if is_one_group else self.size)
        inputs = _widened(index[1], unit, num_inputs)
        groups = slice(0, 1)
        if not is_one_group:
            groups = slice(inputs.start // self.size, -(-inputs.stop // self.size))
        outputs = _widened(index[0], self._per_word, num_outputs)
        stored = self._read_stored(outputs, inputs, groups)
        bits, bias = self.scheme.num_bits, self.scheme.zero_bias
        if self.scheme.method == "awq":
            weight = packing.read_awq(*stored, group_size=self.size)
        else:
            weight = packing.read_gptq(*stored, group_size=self.size, num_bits=bits, zero_bias=bias)
        first = index[0].start - outputs.start
        rows = slice(first, first + index[0].stop - index[0].start)
        return weight.rows(rows), index[1].start - inputs.start

    def _read_unordered(self, index: Index, groups: Tensor) -> Tensor:
        outputs = _widened(index[0], self._per_word, self.shape[0])
        inputs = _widened(index[1], self._per_word, self.shape[1])
        weight = packing.dequantize_gptq(
            *self._read_stored(outputs, inputs, slice(0, self.scales.shape[0])),
            groups[inputs],
            num_bits=self.scheme.num_bits,
            zero_bias=self.scheme.zero_bias,
        )
        rows, columns = (
            slice(part.start - wide.start, part.stop - wide.start)
            for part, wide in zip(index, (outputs, inputs), strict=True)
        )
        return weight[rows, columns]

    def _read_stored(
        self, outputs: slice, inputs: slice, groups: slice
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qweight, qzeros and scales of outputs and inputs that are whole words."""
        per_word = self._per_word
        output_words = slice(outputs.start // per_word, outputs.stop // per_word)
        input_words = slice(inputs.start // per_word, inputs.stop // per_word)
        is_awq = self.scheme.method == "awq"
        return (
            self.qweight.read((inputs, output_words) if is_awq else (input_words, outputs)),
            self.qzeros.read((groups, output_words)),
            self.scales.read((groups, outputs)),
        )

    @property
    def _per_word(self) -> int:
        return 32 // self.scheme.num_bits


def _widened(part: slice, unit: int, total: int) -> slice:
    return slice(part.start // unit * unit, min(-(-part.stop // unit) * unit, total))


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
    if offset is not None and not bool(offset.whole().any()):
        offset = None

    def read_quantized(index: Index) -> QuantizedWeight:
        shift = None if offset is None else _of_rows(offset, index[0], weight.shape[0])
        factor = _of_rows(scale, index[0], weight.shape[0])
        return packing.read_int8(weight.read(index), factor, shift)

    used = {"weight", "weight_scale", "weight_offset", *_ACTIVATIONS}
    whole = SourceTensor(
        weight.name,
        weight.shape,
        lambda index: read_quantized(index).dequantize(),
        QuantizedForm(weight.shape[1], 8, has_offset=offset is not None),
        read_quantized,
    )
    return _instead(parts, used, whole)


def _of_rows(numbers: SourceTensor, rows: slice, num_rows: int) -> Tensor:
    """One number per output, or one for all."""
    if numbers.shape and numbers.shape[0] == num_rows:
        return numbers.read((rows, *(slice(0, size) for size in numbers.shape[1:])))
    return numbers.whole()


_COMBINE = {
    "fp8": _fp8,
    "awq": _words,
    "gptq": _words,
    "compressed-tensors": _int8,
    "modelslim": _int8,
}


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
