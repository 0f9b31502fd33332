"""The key-value header of a GGUF file, without its tensors.

The `gguf` package builds a numpy view per array element, which takes seconds for a vocabulary; the
proxy needs the header alone and must start fast.

    magic "GGUF" | version u32 | num_tensors u64 | num_pairs u64 | pairs: key, type u32, value

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md), versions 2 and 3, little endian.
"""

import mmap
import struct
from pathlib import Path

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

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
_STRING = 8
_ARRAY = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def read_metadata(path: Path) -> dict[str, Value]:
    """Read every key-value pair of a GGUF file.

    Raises: ValueError: when the file is not GGUF, or its header is cut off.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data, path).read_pairs()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: damaged GGUF header: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._offset = 0

    def read_pairs(self) -> dict[str, Value]:
        if self._data[:4] != b"GGUF":
            raise ValueError(f"{self._path} is not a GGUF file")
        self._offset = 4
        version = self._number(_U32)
        if version not in (2, 3):
            raise ValueError(f"{self._path}: GGUF version {version}, supported are 2 and 3")
        self._number(_U64)  # number of tensors
        num_pairs = self._number(_U64)
        return {self._string(): self._value(self._number(_U32)) for _ in range(num_pairs)}

    def _number(self, kind: struct.Struct) -> int:
        value: int = kind.unpack_from(self._data, self._offset)[0]
        self._offset += kind.size
        return value

    def _string(self) -> str:
        length = self._number(_U64)
        start, self._offset = self._offset, self._offset + length
        if self._offset > len(self._data):
            raise IndexError("string reaches past the end of the file")
        return self._data[start : self._offset].decode()

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(kind)
        item_kind = self._number(_U32)
        count = self._number(_U64)
        if item_kind == _STRING:
            return [self._string() for _ in range(count)]
        if item_kind == _ARRAY:
            raise ValueError(f"{self._path}: nested arrays in GGUF metadata are not supported")
        item = self._scalar_struct(item_kind)
        start, self._offset = self._offset, self._offset + count * item.size
        return [value for (value,) in item.iter_unpack(self._data[start : self._offset])]

    def _scalar(self, kind: int) -> Scalar:
        item = self._scalar_struct(kind)
        value: Scalar = item.unpack_from(self._data, self._offset)[0]
        self._offset += item.size
        return value

    def _scalar_struct(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise ValueError(f"{self._path}: unknown GGUF value type {kind}")
        return _SCALARS[kind]
