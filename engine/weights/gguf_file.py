"""A GGUF file with its tensors as views; the contents stay memory mapped."""

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType

from engine.errors import WeightsError
from protos.gguf_header import Value, parse_header

__all__ = ["GGUFFile", "GGUFTensor", "Value", "read_gguf"]


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
    """Map the file and parse its header.

    Raises: WeightsError: this is no GGUF file of version 2 or 3, or it is damaged.
    """
    with path.open("rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise WeightsError(f"{path} is empty") from error
    try:
        header = parse_header(path, mapped)
    except ValueError as error:
        raise WeightsError(str(error)) from error
    contents = np.frombuffer(mapped, np.uint8)
    tensors = [
        GGUFTensor(
            tensor.name, tensor.shape, tensor.quantization, contents[tensor.first : tensor.last]
        )
        for tensor in header.tensors
    ]
    return GGUFFile(path, header.metadata, tensors)
