"""A model's files, looked at before anything starts: missing, cut off, asking for the impossible.

Reads headers and JSON, no weights. What it lets through, the workers still check in full.
"""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.architectures import ARCHITECTURES, GGUF_ARCHITECTURES
from engine.checkpoint.config import parse_model_config
from engine.checkpoint.gguf_config import gguf_model_config
from engine.checkpoint.quantization import DESCRIPTION, read_scheme
from engine.checkpoint.tensor_types import (
    TensorType,
    check_gguf_type,
    check_safetensors_type,
    may_keep_gguf,
    may_keep_safetensors,
)
from engine.config import ModelConfig
from engine.errors import EngineError
from pdserve.errors import BadModel
from protos.gguf_header import read_header

_INDEX = "model.safetensors.index.json"
_HEADER_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 << 20  # the format's own bound
_GENERATION = "generation_config.json"
_OPTIONAL = (_GENERATION, "tokenizer_config.json", DESCRIPTION, _INDEX)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What headers and JSON say of a model that can be served."""

    path: Path
    """Its folder, or its .gguf file."""
    config: ModelConfig
    may_keep: bool
    """Whether weights may be in a form that `quantization: native` keeps; False is certain."""

    @property
    def is_latent(self) -> bool:
        """Whether its attention is latent (MLA)."""
        return self.config.mla is not None


def check_folder(folder: Path) -> ModelFiles:
    """Check a Hugging Face folder.

    Raises: BadModel: names the file, the field and its value, and what would do.
    """
    path = folder / "config.json"
    config = _read_json(path)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise BadModel(
            f"{path}: architectures is {json.dumps(names)}, "
            f"supported: one of {', '.join(ARCHITECTURES)}"
        )
    tokenizer = _read_json(folder / "tokenizer.json")
    model = tokenizer.get("model")
    if not isinstance(model, dict) or not model.get("vocab"):
        raise BadModel(f"{folder / 'tokenizer.json'}: model.vocab is missing or empty")
    optional = {name: _read_json(folder / name) for name in _OPTIONAL if (folder / name).exists()}
    with _named(path):
        model_config = parse_model_config(config, optional.get(_GENERATION))
    description = optional.get(DESCRIPTION)
    with _named(path if description is None else folder / DESCRIPTION):
        scheme = read_scheme(config.get("quantization_config"), description)
    tensors: list[TensorType] = []
    for path in _weight_files(folder, optional.get(_INDEX)):
        found = _safetensors_types(path)
        with _unnamed():
            for name, dtype, _ in found:
                check_safetensors_type(name, dtype, str(path), is_quantized=scheme is not None)
        tensors += found
    return ModelFiles(folder, model_config, may_keep_safetensors(tensors, scheme))


def check_gguf(path: Path) -> ModelFiles:
    """Check a .gguf file.

    Raises: BadModel: names the file, the field and its value, and what would do.
    """
    try:
        header = read_header(path)
    except ValueError as error:
        raise BadModel(str(error)) from None
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror}") from None
    architecture = header.metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise BadModel(
            f"{path}: general.architecture is {json.dumps(architecture)}, "
            f"supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    if not header.metadata.get("tokenizer.ggml.tokens"):
        raise BadModel(f"{path}: tokenizer.ggml.tokens is missing or empty")
    with _named(path):
        model_config = gguf_model_config(path, header)
    tensors = [(t.name, t.quantization.name, len(t.shape)) for t in header.tensors]
    with _unnamed():
        for name, kind, _ in tensors:
            check_gguf_type(name, kind, str(path))
    return ModelFiles(path, model_config, may_keep_gguf(tensors))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn what the engine says of a file's values into an error that names the file."""
    try:
        yield
    except EngineError as error:
        raise BadModel(f"{path}: {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BadModel(f"{path}: a value is not of its kind: {error}") from None


@contextmanager
def _unnamed() -> Iterator[None]:
    """The same of errors that name the file already."""
    try:
        yield
    except EngineError as error:
        raise BadModel(str(error)) from None


def _weight_files(folder: Path, index: Json | None) -> list[Path]:
    if index is None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise BadModel(f"model folder {folder} has no .safetensors file")
        return files
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModel(f"{folder / _INDEX}: weight_map is missing or empty")
    files = [folder / name for name in sorted(set(map(str, weight_map.values())))]
    for path in files:
        if not path.is_file():
            raise BadModel(f"{folder / _INDEX} names {path.name}, which is not there")
    return files


def _safetensors_types(path: Path) -> list[TensorType]:
    """Of a file whose header is whole, and that is as long as it says."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_HEADER_LENGTH.size)
        if len(start) < _HEADER_LENGTH.size:
            raise BadModel(f"{path} is damaged: it has {num_bytes} bytes")
        (header_bytes,) = _HEADER_LENGTH.unpack(start)
        if header_bytes > min(num_bytes, _MAX_HEADER_BYTES):
            raise BadModel(f"{path} is damaged: it starts with the wrong length of its header")
        try:
            header: Json = json.loads(file.read(header_bytes))
            entries = {name: value for name, value in header.items() if name[:2] != "__"}
            ends = [value["data_offsets"][1] for value in entries.values()]
            expected = _HEADER_LENGTH.size + header_bytes + max(ends, default=0)
            types = [(name, str(v["dtype"]), len(v["shape"])) for name, v in entries.items()]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise BadModel(f"{path} is damaged: its header cannot be read") from None
    if num_bytes != expected:
        raise BadModel(
            f"{path} is damaged: it has {num_bytes} bytes, and should have {expected} by its header"
        )
    return types


def _read_json(path: Path) -> Json:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModel(f"model folder {path.parent} has no {path.name}") from None
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadModel(f"{path} is no JSON, or damaged: {error}") from None
    if not isinstance(values, dict):
        raise BadModel(f"{path} holds no JSON object")
    return values
