"""A weight in 4 or 8 bits with scales: what checkpoints hold and every backend packs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """W = values * scale + offset, the last two shared by `group_size` neighbours of a row."""

    values: Tensor
    """[out, in] int8; 0 to 15 with 4 bits."""
    scale: Tensor
    """[out, ceil(in / group_size)] float32."""
    offset: Tensor | None
    """As scale; None means 0."""
    group_size: int
    """A multiple of 8, or the length of the row."""
    num_bits: int
    """4 or 8."""

    @property
    def has_half_factors(self) -> bool:
        """Whether float16 holds every scale and offset exactly."""
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
        num_inputs = self.values.shape[1]

        def spread(factor: Tensor) -> Tensor:
            return factor.repeat_interleave(self.group_size, dim=1)[:, :num_inputs]

        plain = self.values * spread(self.scale)
        return plain if self.offset is None else plain + spread(self.offset)


def concat_rows(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight of all rows, exact; None if the groups differ in size."""
    if len({(weight.group_size, weight.values.shape[1]) for weight in weights}) > 1:
        return None
    offsets = [weight.offset for weight in weights]
    has_offset = any(offset is not None for offset in offsets)
    filled = [
        torch.zeros_like(weight.scale) if offset is None else offset
        for weight, offset in zip(weights, offsets, strict=True)
    ]
    return QuantizedWeight(
        values=torch.cat([weight.values for weight in weights]),
        scale=torch.cat([weight.scale for weight in weights]),
        offset=torch.cat(filled) if has_offset else None,
        group_size=weights[0].group_size,
        num_bits=max(weight.num_bits for weight in weights),
    )
