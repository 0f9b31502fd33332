"""Weights in safetensors files: one, or several with an index. Memory mapped."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import UnsupportedModel, WeightsError
from engine.weights.source import SourceTensor

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
DTYPES = frozenset({"F32", "F16", "BF16"})
PACKED = frozenset({"I8", "I32", "I64", "F8_E4M3"})
"""In quantised checkpoints too."""


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


@contextmanager
def open_safetensors(folder: Path, *, is_quantized: bool = False) -> Iterator[list[SourceTensor]]:
    """List the tensors of a model folder; their `read` works inside the context.

    Raises: UnsupportedModel: a tensor is of an integer or float8 type.
        WeightsError: a file is damaged.
    """
    with ExitStack() as stack:
        tensors: list[SourceTensor] = []
        for path in find_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise WeightsError(f"{path} is damaged: {error}") from error
            tensors.extend(_tensors(path, file, DTYPES | PACKED if is_quantized else DTYPES))
        yield tensors


def _tensors(path: Path, file: Any, dtypes: Collection[str]) -> Iterator[SourceTensor]:
    for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
        header = file.get_slice(name)
        if header.get_dtype() not in dtypes:
            raise UnsupportedModel(
                f"{name} in {path} is {header.get_dtype()}, supported: {', '.join(sorted(dtypes))}"
            )
        shape = tuple(header.get_shape())
        our_name = _our_name(name)
        stem, _, projection = name.rpartition(".")
        if projection in _STACKED_EXPERTS and len(shape) == 3:
            yield from _experts(file, stem, projection, shape)
        else:
            yield SourceTensor(
                our_name, shape, partial(file.get_tensor, name), partial(_read_part, file, name)
            )


def _our_name(name: str) -> str:
    """Mixtral's files name experts in their own way."""
    for theirs, ours in _MIXTRAL_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _experts(
    file: Any, stem: str, projection: str, shape: tuple[int, ...]
) -> Iterator[SourceTensor]:
    """The parts of a tensor [experts, rows, columns], under the names of separate experts."""
    parts = _STACKED_EXPERTS[projection]
    num_experts, rows = shape[0], shape[1] // len(parts)
    for expert in range(num_experts):
        for i, part in enumerate(parts):
            read = partial(_read_expert, file, f"{stem}.{projection}", expert, i * rows)
            yield SourceTensor(
                f"{stem}.{expert}.{part}.weight",
                (rows, shape[2]),
                partial(read, (slice(rows), slice(None))),
                read,
            )


def _read_part(file: Any, name: str, index: Sequence[slice]) -> Tensor:
    values: Tensor = file.get_slice(name)[tuple(index)]
    return values


def _read_expert(
    file: Any, name: str, expert: int, first_row: int, index: Sequence[slice]
) -> Tensor:
    """`index` counts the rows of one part, which start at first_row."""
    rows, columns = index
    rows = slice((rows.start or 0) + first_row, rows.stop + first_row)
    values: Tensor = file.get_slice(name)[expert, rows, columns]
    return values
