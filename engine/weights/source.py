"""Where weights come from, as the loader sees it: named tensors, of which parts are read."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.quantized import QuantizedForm, QuantizedRows, QuantizedWeight

Index = tuple[slice, ...]
"""One slice per dim, with both of its ends."""


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a checkpoint under its Hugging Face name. Any thread may read."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[Index], Tensor]
    """The values of a part, in any floating type; the rest is not read."""
    form: QuantizedForm | None = None
    """How the checkpoint holds the values in 16 bits or fewer; None: it does not."""
    read_quantized: Callable[[Index], QuantizedWeight] | None = None
    """A part in that form, whose columns do not cut through a group."""

    @classmethod
    def of_floats(
        cls,
        name: str,
        shape: tuple[int, ...],
        read: Callable[[Index], Tensor],
        dtype: torch.dtype,
    ) -> "SourceTensor":
        """dtype: of what is read; a matrix of 16 bits may stay so."""
        if len(shape) != 2 or dtype not in (torch.bfloat16, torch.float16):
            return cls(name, shape, read)
        form = QuantizedForm.of_halves(shape[1], dtype)
        return cls(name, shape, read, form, lambda index: QuantizedWeight.of_halves(read(index)))

    def whole(self) -> Tensor:
        """All values."""
        return self.read(tuple(slice(0, size) for size in self.shape))

    def quantized(self, index: Index) -> QuantizedRows | None:
        """A part as the checkpoint holds it; None if it does not, or the part cuts a group."""
        if self.form is None or self.read_quantized is None:
            return None
        columns, size, width = index[1], self.form.group_size, self.shape[1]
        is_cut = columns.start % size or (columns.stop % size and columns.stop < width)
        if size < width and is_cut:
            return None
        num_rows, num_columns = (part.stop - part.start for part in index)
        form = replace(self.form, group_size=min(size, num_columns))
        return _Part((num_rows, num_columns), form, index, self.read_quantized)


@dataclass(frozen=True, slots=True)
class _Part:
    """Implements `QuantizedRows`: read from the checkpoint when asked for."""

    shape: tuple[int, int]
    form: QuantizedForm
    index: Index
    read: Callable[[Index], QuantizedWeight]

    def rows(self, index: slice) -> QuantizedWeight:
        rows, columns = self.index
        return self.read((slice(rows.start + index.start, rows.start + index.stop), columns))
