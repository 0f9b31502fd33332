"""Weights in safetensors files: one, or several with an index. Memory mapped."""

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint.tensor_types import check_safetensors_type
from engine.errors import UnsupportedModel, WeightsError
from engine.weights.mapped_file import MappedFile
from engine.weights.source import Index, SourceTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Tensors [experts, rows, columns] of all experts, as transformers 5 holds them, and their parts.
_STACKED_EXPERTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
_MIXTRAL_NAMES = {
    ".block_sparse_moe.": ".mlp.",
    ".w1.weight": ".gate_proj.weight",
    ".w2.weight": ".down_proj.weight",
    ".w3.weight": ".up_proj.weight",
}
# Integers of the same size, which numpy has for all of them.
_TYPES: dict[str, tuple[type[np.generic], torch.dtype]] = {
    "F32": (np.int32, torch.float32),
    "F16": (np.int16, torch.float16),
    "BF16": (np.int16, torch.bfloat16),
    "F8_E4M3": (np.uint8, torch.float8_e4m3fn),
    "I8": (np.int8, torch.int8),
    "I32": (np.int32, torch.int32),
    "I64": (np.int64, torch.int64),
}
_HEADER_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"


def find_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises: UnsupportedModel: only pickled weights are there.
        WeightsError: none are, or a file of the index is missing.
    """
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise WeightsError(f"{index} names files that are missing: {', '.join(missing)}")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        raise UnsupportedModel(
            f"{folder} holds pickled weights ({pickles[0]}), which could run code when loaded; "
            "convert them to safetensors"
        )
    raise WeightsError(f"{folder} holds no safetensors file")


def open_safetensors(
    folder: Path, *, is_quantized: bool = False
) -> tuple[list[SourceTensor], list[MappedFile]]:
    """The tensors of a model folder, and the files that they are read from.

    Raises: UnsupportedModel: a tensor is of an integer or float8 type.
        WeightsError: a file is damaged.
    """
    tensors: list[SourceTensor] = []
    files: list[MappedFile] = []
    for path in find_files(folder):
        try:
            with safe_open(path, framework="np"):
                pass  # its header is whole, and so are the tensors
        except SafetensorError as error:
            raise WeightsError(f"{path} is damaged: {error}") from error
        file = MappedFile(path)
        files.append(file)
        tensors.extend(_tensors(path, file, is_quantized=is_quantized))
    return tensors, files


def _tensors(path: Path, file: MappedFile, *, is_quantized: bool) -> Iterator[SourceTensor]:
    (header_bytes,) = _HEADER_LENGTH.unpack_from(file.contents, 0)
    data_start = _HEADER_LENGTH.size + header_bytes
    header = json.loads(file.contents[_HEADER_LENGTH.size : data_start])
    for name, entry in header.items():
        if name == _METADATA:
            continue
        check_safetensors_type(name, entry["dtype"], str(path), is_quantized=is_quantized)
        shape = tuple(entry["shape"])
        integer, dtype = _TYPES[entry["dtype"]]
        read = partial(_read, file, data_start + entry["data_offsets"][0], integer, dtype, shape)
        stem, _, projection = name.rpartition(".")
        if projection in _STACKED_EXPERTS and len(shape) == 3:
            yield from _experts(read, stem, projection, shape, dtype)
        else:
            yield SourceTensor.of_floats(_our_name(name), shape, read, dtype)


def _our_name(name: str) -> str:
    """Mixtral's files name experts in their own way."""
    for theirs, ours in _MIXTRAL_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _experts(
    read: Callable[[Index], Tensor],
    stem: str,
    projection: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Iterator[SourceTensor]:
    """The parts of a tensor [experts, rows, columns], under the names of separate experts."""
    parts = _STACKED_EXPERTS[projection]
    num_experts, rows = shape[0], shape[1] // len(parts)
    for expert in range(num_experts):
        for i, part in enumerate(parts):
            yield SourceTensor.of_floats(
                f"{stem}.{expert}.{part}.weight",
                (rows, shape[2]),
                partial(_read_expert, read, expert, i * rows),
                dtype,
            )


def _read(
    file: MappedFile,
    first: int,
    integer: type[np.generic],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    index: Index,
) -> Tensor:
    return torch.from_numpy(file.read(first, integer, shape, index)).view(dtype)


def _read_expert(
    read: Callable[[Index], Tensor], expert: int, first_row: int, index: Index
) -> Tensor:
    """`index` counts the rows of one part, which start at first_row."""
    rows, columns = index
    rows = slice(rows.start + first_row, rows.stop + first_row)
    return read((slice(expert, expert + 1), rows, columns))[0]
