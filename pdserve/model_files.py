"""A model's files, looked at before anything starts: missing, cut off, asking for the impossible.

Reads headers and JSON, no weights. What it lets through, the workers still check in full.
"""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.architectures import ARCHITECTURES, GGUF_ARCHITECTURES
from engine.checkpoint.config import parse_model_config
from engine.checkpoint.gguf_config import gguf_model_config
from engine.checkpoint.quantization import DESCRIPTION, read_scheme
from engine.errors import EngineError
from pdserve.errors import BadModel
from protos.gguf_header import read_header

_INDEX = "model.safetensors.index.json"
_HEADER_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100 << 20  # the format's own bound
_GENERATION = "generation_config.json"
_OPTIONAL = (_GENERATION, "tokenizer_config.json", DESCRIPTION, _INDEX)

Json = dict[str, Any]


def check_folder(folder: Path) -> None:
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
        parse_model_config(config, optional.get(_GENERATION))
    description = optional.get(DESCRIPTION)
    with _named(path if description is None else folder / DESCRIPTION):
        read_scheme(config.get("quantization_config"), description)
    for path in _weight_files(folder, optional.get(_INDEX)):
        _check_safetensors(path)


def check_gguf(path: Path) -> None:
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
        gguf_model_config(path, header)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn what the engine says of a file's values into an error that names the file."""
    try:
        yield
    except EngineError as error:
        raise BadModel(f"{path}: {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BadModel(f"{path}: a value is not of its kind: {error}") from None


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


def _check_safetensors(path: Path) -> None:
    """The header must be whole, and the file as long as it says."""
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
            ends = [value["data_offsets"][1] for name, value in header.items() if name[:2] != "__"]
            expected = _HEADER_LENGTH.size + header_bytes + max(ends, default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise BadModel(f"{path} is damaged: its header cannot be read") from None
    if num_bytes != expected:
        raise BadModel(
            f"{path} is damaged: it has {num_bytes} bytes, and should have {expected} by its header"
        )


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
