"""A weight in 4 or 8 bits with scales, or in 16: what checkpoints hold and every backend packs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class QuantizedForm:
    """How a weight is held: known before any of it is read."""

    group_size: int
    """Neighbours of a row that share a scale: a multiple of 8, or the length of the row."""
    num_bits: int
    """4 or 8; 16: the values are floats, and there are no scales."""
    has_offset: bool
    floats: torch.dtype | None = None
    """Of values in 16 bits: bfloat16 or float16."""

    @classmethod
    def of_halves(cls, num_inputs: int, dtype: torch.dtype) -> "QuantizedForm":
        """Of rows that are floats of 16 bits."""
        return cls(num_inputs, 16, has_offset=False, floats=dtype)


class QuantizedRows(Protocol):
    """A weight whose rows are made when they are asked for; a `QuantizedWeight` is one of them."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        ...

    @property
    def form(self) -> QuantizedForm:
        """The same for all rows."""
        ...

    def rows(self, index: slice) -> "QuantizedWeight":
        """Some rows, as `values[index]` has them."""
        ...


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """W = values * scale + offset, the last two shared by `group_size` neighbours of a row.

    With 16 bits, W = values.
    """

    values: Tensor
    """[out, in] int8; 0 to 15 with 4 bits; bfloat16 or float16 with 16."""
    scale: Tensor
    """[out, ceil(in / group_size)] float32; [out, 0] with 16 bits."""
    offset: Tensor | None
    """As scale; None means 0."""
    group_size: int
    """A multiple of 8, or the length of the row."""
    num_bits: int
    """4, 8 or 16."""

    @classmethod
    def of_halves(cls, values: Tensor) -> "QuantizedWeight":
        """values: [out, in], bfloat16 or float16: the weight itself."""
        return cls(values, torch.empty(len(values), 0), None, values.shape[1], 16)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        num_outputs, num_inputs = self.values.shape
        return num_outputs, num_inputs

    @property
    def form(self) -> QuantizedForm:
        """See `QuantizedRows.form`."""
        floats = self.values.dtype if self.num_bits == 16 else None
        return QuantizedForm(self.group_size, self.num_bits, self.offset is not None, floats)

    @property
    def has_half_factors(self) -> bool:
        """Whether float16 holds every scale and offset exactly; with 16 bits, every value."""
        if self.num_bits == 16:
            return self.values.dtype == torch.float16
        factors = [self.scale] if self.offset is None else [self.scale, self.offset]
        return all(bool((factor.half().float() == factor).all()) for factor in factors)

    @property
    def is_int8_per_row(self) -> bool:
        """Whether it is W = int8 * scale with one scale per output."""
        return self.num_bits == 8 and self.offset is None and self.scale.shape[1] == 1

    def rows(self, index: Tensor | slice) -> "QuantizedWeight":
        """Some rows, as `values[index]` has them."""
        offset = None if self.offset is None else self.offset[index]
        return replace(self, values=self.values[index], scale=self.scale[index], offset=offset)

    def columns(self, start: int, stop: int) -> "QuantizedWeight | None":
        """The inputs [start, stop); None if they cut through a group."""
        size, whole = self.group_size, self.values.shape[1]
        if self.scale.shape[1] > 1 and (start % size or (stop % size and stop < whole)):
            return None
        groups = slice(start // size, -(-stop // size)) if self.scale.shape[1] > 1 else slice(None)
        return replace(
            self,
            values=self.values[:, start:stop],
            scale=self.scale[:, groups],
            offset=None if self.offset is None else self.offset[:, groups],
            group_size=min(size, stop - start),
        )

    def padded(self, num_rows: int) -> "QuantizedWeight":
        """With rows of zeros up to num_rows."""
        padding = (0, 0, 0, num_rows - len(self.values))
        return replace(
            self,
            values=functional.pad(self.values, padding),
            scale=functional.pad(self.scale, padding),
            offset=None if self.offset is None else functional.pad(self.offset, padding),
        )

    def dequantize(self) -> Tensor:
        """W, [out, in] float32."""
        if self.num_bits == 16:
            return self.values.float()
        num_inputs = self.values.shape[1]

        def spread(factor: Tensor) -> Tensor:
            return factor.repeat_interleave(self.group_size, dim=1)[:, :num_inputs]

        plain = self.values * spread(self.scale)
        return plain if self.offset is None else plain + spread(self.offset)


def whole(weight: QuantizedRows) -> QuantizedWeight:
    """All rows at once."""
    return weight.rows(slice(0, weight.shape[0]))


class _FusedRows:
    """Implements `QuantizedRows` for the rows of several weights, one after the other."""

    def __init__(self, parts: Sequence[QuantizedRows]) -> None:
        forms = [part.form for part in parts]
        self._parts = parts
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.form = QuantizedForm(
            forms[0].group_size,
            max(form.num_bits for form in forms),
            any(form.has_offset for form in forms),
            forms[0].floats,
        )

    def rows(self, index: slice) -> QuantizedWeight:
        found, first = [], 0
        for part in self._parts:
            length = part.shape[0]
            start, stop = max(index.start - first, 0), min(index.stop - first, length)
            if start < stop:
                found.append(part.rows(slice(start, stop)))
            first += length
        offsets = [
            torch.zeros_like(weight.scale) if weight.offset is None else weight.offset
            for weight in found
        ]
        return QuantizedWeight(
            values=torch.cat([weight.values for weight in found]),
            scale=torch.cat([weight.scale for weight in found]),
            offset=torch.cat(offsets) if self.form.has_offset else None,
            group_size=self.form.group_size,
            num_bits=self.form.num_bits,
        )


def concat_rows(weights: Sequence[QuantizedRows]) -> QuantizedRows | None:
    """One weight of all rows, exact; None if the groups differ in size, or floats in type."""
    if len({(w.form.group_size, w.shape[1], w.form.floats) for w in weights}) > 1:
        return None
    return weights[0] if len(weights) == 1 else _FusedRows(weights)


class PaddedRows:
    """Implements `QuantizedRows`: a weight, then rows of zeros."""

    def __init__(self, weight: QuantizedRows, num_rows: int) -> None:
        self._weight = weight
        self.shape = (num_rows, weight.shape[1])
        self.form = weight.form

    def rows(self, index: slice) -> QuantizedWeight:
        """Some rows, all of which there are for an index past the weight's end."""
        length = self._weight.shape[0]
        start = min(index.start, length - 1)
        found = self._weight.rows(slice(start, min(index.stop, length)))
        if index.start >= length:
            found = found.rows(slice(0, 0))
        return found.padded(index.stop - index.start)
