"""The bytes that each token id stands for, from a model's own files: what grammars match."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import WeightsError
from engine.weights.gguf_file import read_gguf
from protos.byte_level import byte_level_table

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Token types of GGUF.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids are positions in token_bytes."""

    token_bytes: list[bytes]
    special_ids: frozenset[int]
    """Control tokens: no text produces them."""


def load_vocabulary(path: Path) -> Vocabulary:
    """Read the vocabulary of a .gguf file, or of a folder with a tokenizer.json.

    Raises: WeightsError: there is none, or it is of an unknown kind.
    """
    return _from_gguf(path) if path.suffix == ".gguf" else _from_folder(path)


def _from_gguf(path: Path) -> Vocabulary:
    metadata = read_gguf(path).metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise WeightsError(f"{path} holds no vocabulary")
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = [int(kind) for kind in types] if isinstance(types, list) else [1] * len(tokens)
    special = frozenset(i for i, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL))
    literal = special | {i for i, kind in enumerate(kinds) if kind == _USER_DEFINED}
    is_byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
    pieces = ((i, str(token)) for i, token in enumerate(tokens))
    return Vocabulary(_to_bytes(pieces, len(tokens), literal, is_byte_level), special)


def _from_folder(folder: Path) -> Vocabulary:
    path = folder / "tokenizer.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    vocab = raw.get("model", {}).get("vocab")
    pieces: dict[int, str]
    if isinstance(vocab, dict):
        pieces = {i: token for token, i in vocab.items()}
    elif isinstance(vocab, list):
        pieces = {i: entry[0] for i, entry in enumerate(vocab)}
    else:
        raise WeightsError(f"{path} holds no vocabulary")
    added: list[Mapping[str, Any]] = raw.get("added_tokens") or []
    pieces |= {entry["id"]: entry["content"] for entry in added}
    is_byte_level = '"ByteLevel"' in json.dumps(raw.get("decoder"))
    literal = frozenset(entry["id"] for entry in added)
    special = frozenset(entry["id"] for entry in added if entry.get("special"))
    size = max(pieces, default=-1) + 1
    return Vocabulary(_to_bytes(pieces.items(), size, literal, is_byte_level), special)


def _to_bytes(
    pieces: Iterable[tuple[int, str]], size: int, literal: frozenset[int], is_byte_level: bool
) -> list[bytes]:
    """Undo the spelling of a vocabulary; `literal` tokens are spelled as they are."""
    table = byte_level_table()
    result = [b""] * size
    for i, piece in pieces:
        if i in literal:
            result[i] = piece.encode(errors="surrogateescape")
        elif is_byte_level and all(ord(char) in table for char in piece):
            result[i] = bytes(table[ord(char)] for char in piece)
        elif (match := _BYTE_PIECE.fullmatch(piece)) is not None:
            result[i] = bytes([int(match[1], 16)])
        else:
            result[i] = piece.replace("▁", " ").encode(errors="surrogateescape")
    return result
