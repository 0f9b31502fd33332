"""A file of weights: mapped, and resident only while a part of it is read."""

import math
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import WeightsError

Array = npt.NDArray[Any]

# Linux maps up to a huge page at once.
_FAULT_AROUND = 1 << 21


class MappedFile:
    """Any thread may read."""

    def __init__(self, path: Path) -> None:
        """Map it.

        Raises: WeightsError: it is empty. OSError: it cannot be opened.
        """
        with path.open("rb") as file:
            try:
                self.contents = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise WeightsError(f"{path} is empty") from error
        self._lock = threading.Lock()
        self._num_bytes_read = 0

    @property
    def num_bytes_read(self) -> int:
        """Of all parts, as often as each was read."""
        return self._num_bytes_read

    def read(
        self,
        first: int,
        dtype: npt.DTypeLike,
        shape: Sequence[int],
        index: Sequence[slice | Array],
    ) -> Array:
        """Copy a part of the array of this type and shape that starts at byte `first`.

        index: for the first dims, at most one of them an array.
        """
        whole = np.frombuffer(self.contents, dtype, math.prod(shape), first).reshape(shape)
        part = np.array(whole[tuple(index)], order="C", copy=True)
        if part.nbytes:
            row_bytes = whole[0].nbytes if shape else whole.nbytes
            start, stop = _bounds(index[0]) if index else (0, 1)
            self._release(first + start * row_bytes, first + stop * row_bytes)
        with self._lock:
            self._num_bytes_read += part.nbytes
        return part

    def _release(self, start: int, stop: int) -> None:
        """Let the pages go; whoever reads them again finds them in the page cache.

        With their neighbours, which the kernel may have mapped along with them.
        """
        start = max(start - _FAULT_AROUND, 0) // mmap.PAGESIZE * mmap.PAGESIZE
        stop = min(stop + _FAULT_AROUND, len(self.contents))
        self.contents.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _bounds(index: slice | Array) -> tuple[int, int]:
    if isinstance(index, slice):
        return index.start, index.stop
    return int(index.min()), int(index.max()) + 1
