"""The GGUF container: metadata and the place of every tensor. Contents stay memory mapped.

    magic, version, counts | (key, type, value)* | (name, dims, type, offset)* | padding | data

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import WeightsError

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_HEADER = struct.Struct("<4sIQQ")
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor as stored."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in PyTorch; the file has it reversed."""
    quantization: GGMLQuantizationType
    data: npt.NDArray[np.uint8]
    """Its bytes, a view into the mapped file."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header."""

    path: Path
    metadata: dict[str, Value]
    tensors: list[GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Map the file and parse its header; the gguf package's reader takes twenty times as long.

    Raises: WeightsError: this is no GGUF file of version 2 or 3, or it is damaged.
    """
    with path.open("rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise WeightsError(f"{path} is empty") from error
    try:
        return _parse(path, mapped)
    except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
        raise WeightsError(f"{path} is no GGUF file, or damaged: {error}") from error


def _parse(path: Path, mapped: mmap.mmap) -> GGUFFile:
    magic, version, num_tensors, num_values = _HEADER.unpack_from(mapped, 0)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it starts with {magic!r}, version {version}; supported: 2 and 3")
    cursor = _Cursor(mapped, _HEADER.size)
    metadata: dict[str, Value] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar(_U32))
    headers = [cursor.tensor_header() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    contents = np.frombuffer(mapped, np.uint8)
    tensors = []
    for name, shape, quantization, offset in headers:
        block_size, block_bytes = GGML_QUANT_SIZES[quantization]
        num_elements = math.prod(shape)  # a damaged header's may exceed 64 bits
        first = start + offset
        last = first + num_elements // block_size * block_bytes
        if shape[-1] % block_size or last > len(contents):
            raise ValueError(f"tensor {name} of shape {shape} does not lie inside the file")
        tensors.append(GGUFTensor(name, shape, quantization, contents[first:last]))
    return GGUFFile(path, metadata, tensors)


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, buffer: mmap.mmap, position: int) -> None:
        self._buffer = buffer
        self.position = position

    def scalar(self, kind: struct.Struct) -> int:
        (value,) = kind.unpack_from(self._buffer, self.position)
        self.position += kind.size
        return value  # type: ignore[no-any-return]

    def string(self) -> str:
        length = self.scalar(_U64)
        end = self.position + length
        if end > len(self._buffer):
            raise ValueError(f"a string of {length} bytes at {self.position} exceeds the file")
        # Vocabularies may hold tokens that are no UTF-8 on their own.
        text = self._buffer[self.position : end].decode(errors="surrogateescape")
        self.position = end
        return text

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Scalar]:
        kind, length = self.scalar(_U32), self.scalar(_U64)
        if length > len(self._buffer):
            raise ValueError(f"an array of {length} values at {self.position} exceeds the file")
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        packed = struct.Struct(f"<{length}{_SCALARS[kind].format[1:]}")
        values = packed.unpack_from(self._buffer, self.position)
        self.position += packed.size
        return list(values)

    def tensor_header(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, num_dims = self.string(), self.scalar(_U32)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dims")
        shape = tuple(self.scalar(_U64) for _ in range(num_dims))[::-1]
        quantization = GGMLQuantizationType(self.scalar(_U32))
        return name, shape, quantization, self.scalar(_U64)
