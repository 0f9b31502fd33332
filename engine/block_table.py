"""The block table of a batch, kept from step to step and written where it changes."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32s = npt.NDArray[np.int32]
MakeInts = Callable[[int], Tensor]
"""[size] int32 zeros of the host."""

_WIDTH_STEP = 16


def plain_ints(size: int) -> Tensor:
    """[size] int32 zeros."""
    return torch.zeros(size, dtype=torch.int32)


class GrowableArray:
    """An int32 buffer that is handed out from its start and only ever grows."""

    def __init__(self, capacity: int, make: MakeInts = plain_ints) -> None:
        self._make = make
        self._tensor = make(capacity)
        self._array: Int32s = self._tensor.numpy()

    def take(self, size: int) -> Int32s:
        """A view on the first `size` elements; contents are those of the last use."""
        if size > len(self._array):
            self._tensor = self._make(max(size, 2 * len(self._array)))
            self._array = self._tensor.numpy()
        return self._array[:size]

    def tensor(self, size: int) -> Tensor:
        """The same memory; after `take` of at least as many."""
        return self._tensor[:size]


class BlockTable:
    """Rows of block ids. A sequence that stays in its row costs nothing but its new blocks."""

    def __init__(self, make: MakeInts = plain_ints) -> None:
        self._array = GrowableArray(4096, make)
        self._capacity = 4096
        self._width = 0
        # NOTE: a request that loses its blocks gets another list, one that grows keeps its own.
        self._rows: list[list[int]] = []
        self._filled: list[int] = []

    def fill(self, rows: Sequence[list[int]], counts: Sequence[int]) -> tuple[Int32s, Tensor]:
        """The first counts[i] ids of rows[i]: [N, width], as an array and as a tensor.

        Contiguous, at least as wide as the largest count; entries past a row's are arbitrary.
        """
        num_rows, widest = len(rows), max(counts)
        if widest > self._width or num_rows * self._width > self._capacity:
            self._width = max(self._width, -(-widest // _WIDTH_STEP) * _WIDTH_STEP)
            self._capacity = max(self._capacity, num_rows * self._width)
            self._rows, self._filled = [], []
        size = num_rows * self._width
        table = self._array.take(size).reshape(num_rows, self._width)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if i == len(self._rows):
                self._rows.append(row)
                self._filled.append(0)
            first = self._filled[i] if self._rows[i] is row else 0
            if first < count:
                table[i, first:count] = row[first:count]
                first = count
            self._rows[i], self._filled[i] = row, first
        return table, self._array.tensor(size).view(num_rows, self._width)
