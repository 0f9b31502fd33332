"""A GGUF file whose tensors are read in parts; the contents stay memory mapped."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import WeightsError
from engine.weights.mapped_file import MappedFile
from protos.gguf_header import GGUFHeader, Value, parse_header

__all__ = ["GGUFFile", "GGUFTensor", "Value", "read_gguf"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as stored."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in PyTorch; the file has it reversed."""
    quantization: GGMLQuantizationType
    file: MappedFile
    first: int
    """Its first byte in the file."""

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows, and columns, of all dims but the first together; one row if there is one dim."""
        if len(self.shape) == 1:
            return 1, self.shape[0]
        return self.shape[0], prod(self.shape[1:])

    def blocks(self, rows: slice | npt.NDArray[Any], columns: slice) -> Bytes:
        """[rows, blocks, bytes of a block]: the blocks that these columns of `matrix` are in."""
        block_size, block_bytes = GGML_QUANT_SIZES[self.quantization]
        num_rows, num_columns = self.matrix
        shape = (num_rows, num_columns // block_size, block_bytes)
        blocks = slice(columns.start // block_size, -(-columns.stop // block_size))
        return self.file.read(self.first, np.uint8, shape, (rows, blocks))

    def slice_of(self, i: int, name: str) -> "GGUFTensor":
        """`tensor[i]`, under another name."""
        block_size, block_bytes = GGML_QUANT_SIZES[self.quantization]
        num_bytes = prod(self.shape[1:]) // block_size * block_bytes
        first = self.first + i * num_bytes
        return GGUFTensor(name, self.shape[1:], self.quantization, self.file, first)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header."""

    path: Path
    header: GGUFHeader
    tensors: list[GGUFTensor]
    file: MappedFile

    @property
    def metadata(self) -> dict[str, Value]:
        """Of the header."""
        return self.header.metadata


def read_gguf(path: Path) -> GGUFFile:
    """Map the file and parse its header.

    Raises: WeightsError: this is no GGUF file of version 2 or 3, or it is damaged.
    """
    file = MappedFile(path)
    try:
        header = parse_header(path, file.contents)
    except ValueError as error:
        raise WeightsError(str(error)) from error
    tensors = [
        GGUFTensor(tensor.name, tensor.shape, tensor.quantization, file, tensor.first)
        for tensor in header.tensors
    ]
    return GGUFFile(path, header, tensors, file)
