"""The header of a GGUF file: its metadata and where each tensor lies. Reads no tensor.

    magic "GGUF", version u32, num_tensors u64, num_values u64
    | (key, type u32, value)* | (name, num_dims u32, dims u64.., type u32, offset u64)* | pad | data

Here, because the proxy reads the tokenizer from it and the engine the weights. The gguf package's
own reader builds a numpy view per array element, which takes seconds for a vocabulary.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md), versions 2 and 3, little endian.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

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
_START = struct.Struct("<4sIQQ")
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as stored."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in PyTorch; the file has it reversed."""
    quantization: GGMLQuantizationType
    first: int
    """Its first byte in the file."""
    last: int
    """The byte after its last one; inside the file."""


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """All of a file but its data."""

    metadata: dict[str, Value]
    tensors: list[TensorHeader]


def read_header(path: Path) -> GGUFHeader:
    """Read a file's header; nothing of the file stays mapped.

    Strings that are no UTF-8 come with surrogate escapes: vocabularies may hold such tokens.

    Raises: ValueError: no GGUF file of version 2 or 3, or damaged; names the file. OSError.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError(f"{path} is no GGUF file: it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return parse_header(path, mapped)


def parse_header(path: Path, mapped: mmap.mmap) -> GGUFHeader:
    """The same for a file that is mapped already; `path` is for the error."""
    try:
        return _parse(mapped)
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise ValueError(f"{path} is no GGUF file, or damaged: {error}") from error


def _parse(mapped: mmap.mmap) -> GGUFHeader:
    magic, version, num_tensors, num_values = _START.unpack_from(mapped, 0)
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"it starts with {magic!r}, version {version}; supported: 2 and 3")
    cursor = _Cursor(mapped, _START.size)
    metadata: dict[str, Value] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar(_U32))
    relative = [cursor.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors = [_placed(start, len(mapped), *tensor) for tensor in relative]
    return GGUFHeader(metadata, tensors)


def _placed(
    start: int, file_bytes: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> TensorHeader:
    try:
        quantization = GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(f"tensor {name} has the unknown type {kind}") from None
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    first = start + offset
    last = first + math.prod(shape) // block_size * block_bytes
    if shape[-1] % block_size or last > file_bytes:
        raise ValueError(
            f"tensor {name} of shape {shape} does not lie inside the file's {file_bytes} bytes"
        )
    return TensorHeader(name, shape, quantization, first, last)


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
        text = self._buffer[self.position : end].decode(errors="surrogateescape")
        self.position = end
        return text

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(_scalar(kind))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type, and offset from the start of the data."""
        name, num_dims = self.string(), self.scalar(_U32)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dims")
        shape = tuple(self.scalar(_U64) for _ in range(num_dims))[::-1]
        return name, shape, self.scalar(_U32), self.scalar(_U64)

    def _array(self) -> list[Scalar]:
        kind, length = self.scalar(_U32), self.scalar(_U64)
        if length > len(self._buffer):
            raise ValueError(f"an array of {length} values at {self.position} exceeds the file")
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        packed = struct.Struct(f"<{length}{_scalar(kind).format[1:]}")
        values = packed.unpack_from(self._buffer, self.position)
        self.position += packed.size
        return list(values)


def _scalar(kind: int) -> struct.Struct:
    if kind not in _SCALARS:
        raise ValueError(f"a value has the unknown type {kind}")
    return _SCALARS[kind]
