"""Text to token ids and back: tokenizers of Hugging Face folders and of GGUF files."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from protos.byte_level import byte_level_table
from protos.gguf_header import Value, read_header
from proxy.chat_template import ChatTemplate
from proxy.errors import Unsupported

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
INLINE_CHARS = 2048
"""Longer texts are better encoded in a thread, which lets others run; a millisecond or two."""

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_PATTERNS = {
    "llama-bpe": _LLAMA3_PATTERN,
    "llama3": _LLAMA3_PATTERN,
    "qwen2": _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
}


class Tokenizer:
    """A tokenizer, its chat template and the bytes that each token stands for. Thread-safe."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        token_bytes: Sequence[bytes],
        special_ids: frozenset[int],
        chat_template: ChatTemplate | None,
        context_length: int,
        strips_leading_space: bool,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.token_bytes = token_bytes
        """By token id; the bytes of all tokens, joined, are the text in UTF-8."""
        self.special_ids = special_ids
        self.context_length = context_length
        """Of the model, in tokens; 0 when its files do not say."""
        self.strips_leading_space = strips_leading_space
        """SentencePiece: the space before the first word is not part of the text."""
        self.max_token_bytes = max(map(len, token_bytes), default=1)

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return len(self.token_bytes)

    @property
    def template_source(self) -> str:
        """The chat template; empty when there is none."""
        return "" if self._chat_template is None else self._chat_template.source

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised."""
        if len(text) <= INLINE_CHARS:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # NOTE: the library keeps the GIL for one text, a second and more for a megabyte, but not
        # for a batch.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_strs(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary spells them, such as `\u0120the` or `\u2581the`."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Prompt text of a conversation.

        Raises: Unsupported: the model has no chat template; InvalidRequest: it refused.
        """
        if self._chat_template is None:
            raise Unsupported("this model has no chat template", param="messages")
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs or {},
            tools=tools,
        )


def load_tokenizer(path: Path) -> Tokenizer:
    """Load from a .gguf file or a Hugging Face folder.

    Raises: ValueError: when a file is damaged or of an unknown kind; names it. OSError.
    """
    if path.suffix == ".gguf":
        with _named(path):
            return _load_gguf(path)
    with _named(path / "tokenizer.json"):
        return _load_folder(path)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say of which file it was that something in it is not as it should be."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, TemplateError) as error:
        if str(path.parent) in str(error):  # somebody knew better
            raise
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged or not supported: {reason}") from error


def _load_folder(folder: Path) -> Tokenizer:
    raw = _read_json(folder / "tokenizer.json")
    backend = _backend(folder / "tokenizer.json")
    settings = _optional_json(folder / "tokenizer_config.json")
    specials = {
        name: token["content"] if isinstance(token, dict) else token
        for name in _SPECIAL_NAMES
        if (token := settings.get(name)) is not None
    }
    source = settings.get("chat_template")
    template_path = folder / "chat_template.jinja"
    if template_path.exists():
        source = template_path.read_text(encoding="utf-8")
    else:
        template_path = folder / "tokenizer_config.json"
    with _named(template_path):
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        chat_template = ChatTemplate(source, specials) if source else None
    model_config = _optional_json(folder / "config.json")
    text_config = model_config.get("text_config", model_config)
    decoder = json.dumps(raw.get("decoder"))
    is_byte_level = '"ByteLevel"' in decoder
    added = {entry["id"]: entry["content"] for entry in raw.get("added_tokens", [])}
    return Tokenizer(
        backend,
        token_bytes=_token_bytes(backend, added, is_byte_level=is_byte_level),
        special_ids=frozenset(
            entry["id"] for entry in raw.get("added_tokens", []) if entry["special"]
        ),
        chat_template=chat_template,
        context_length=int(text_config.get("max_position_embeddings", 0)),
        strips_leading_space='"Strip"' in decoder or '"Metaspace"' in decoder,
    )


def _backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is no tokenizer, or damaged: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON, or damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def _optional_json(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.exists() else {}


def _load_gguf(path: Path) -> Tokenizer:
    metadata = read_header(path).metadata
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = _numbers(metadata, "tokenizer.ggml.token_type") or [1] * len(tokens)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend = _byte_level_backend(metadata, tokens, path)
    elif kind == "llama":
        backend = _sentencepiece_backend(metadata, tokens)
    else:
        raise ValueError(f"{path}: tokenizer model {kind!r} is not supported (gpt2, llama)")
    special_ids = {i for i, type_ in enumerate(types) if type_ in (_UNKNOWN, _CONTROL)}
    user_ids = {i for i, type_ in enumerate(types) if type_ == _USER_DEFINED}
    backend.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special_ids)]
    )
    backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in sorted(user_ids)])
    specials = _special_tokens(metadata, tokens)
    if metadata.get("tokenizer.ggml.add_bos_token", kind == "llama") and "bos_token" in specials:
        bos = specials["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    source = metadata.get("tokenizer.chat_template")
    architecture = metadata.get("general.architecture", "")
    context_length = metadata.get(f"{architecture}.context_length", 0)
    added = {i: tokens[i] for i in special_ids | user_ids}
    return Tokenizer(
        backend,
        token_bytes=_token_bytes(backend, added, is_byte_level=kind == "gpt2"),
        special_ids=frozenset(special_ids),
        chat_template=ChatTemplate(source, specials) if isinstance(source, str) else None,
        context_length=context_length if isinstance(context_length, int) else 0,
        strips_leading_space=kind == "llama",
    )


def _byte_level_backend(
    metadata: Mapping[str, Value], tokens: list[str], path: Path
) -> tokenizers.Tokenizer:
    """GPT-2 style BPE; `tokenizer.ggml.pre` names how text is split first."""
    merges = [_split_merge(merge) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    pre = metadata.get("tokenizer.ggml.pre", "default")
    ignore_merges = pre in ("llama-bpe", "llama3")
    backend = tokenizers.Tokenizer(_bpe(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    splitter: pre_tokenizers.PreTokenizer
    if pre == "smollm":
        splitter = pre_tokenizers.Digits(individual_digits=True)
    elif pre in _SPLIT_PATTERNS:
        splitter = pre_tokenizers.Split(Regex(_SPLIT_PATTERNS[str(pre)]), behavior="isolated")
    elif pre in ("gpt-2", "default"):
        splitter = pre_tokenizers.Split(Regex("$^"), behavior="isolated")
    else:
        known = ", ".join(["smollm", "gpt-2", "default", *_SPLIT_PATTERNS])
        raise ValueError(f"{path}: pre-tokenizer {pre!r} is not supported ({known})")
    use_regex = pre not in _SPLIT_PATTERNS
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [splitter, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _bpe(**options: Any) -> models.BPE:
    try:
        return models.BPE(**options)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(str(error)) from error


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece_backend(
    metadata: Mapping[str, Value], tokens: list[str]
) -> tokenizers.Tokenizer:
    """SentencePiece BPE: a pair merges when its union is a piece, best score first."""
    scores = _numbers(metadata, "tokenizer.ggml.scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[i], vocab[left], vocab[right], (left, right)))
    ranked.sort()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = tokenizers.Tokenizer(
        _bpe(
            vocab=vocab,
            merges=[pair for *_, pair in ranked],
            unk_token=tokens[unknown] if isinstance(unknown, int) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def _special_tokens(metadata: Mapping[str, Value], tokens: list[str]) -> dict[str, str]:
    """The names under which chat templates know the special tokens."""
    ids = {
        "bos_token": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token": metadata.get("tokenizer.ggml.eos_token_id"),
        "unk_token": metadata.get("tokenizer.ggml.unknown_token_id"),
        "pad_token": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and i < len(tokens)}


def _token_bytes(
    backend: tokenizers.Tokenizer, added: Mapping[int, str], *, is_byte_level: bool
) -> list[bytes]:
    vocab = backend.get_vocab(with_added_tokens=True)
    table = byte_level_table()
    result = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        if i in added:
            result[i] = added[i].encode()
        elif is_byte_level:
            try:
                result[i] = token.translate(table).encode("latin-1")
            except UnicodeEncodeError:
                result[i] = token.encode()
        elif (match := _BYTE_PIECE.fullmatch(token)) is not None:
            result[i] = bytes([int(match[1], 16)])
        else:
            result[i] = token.replace("▁", " ").encode()
    return result


def _strings(metadata: Mapping[str, Value], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list):
        raise ValueError(f"GGUF metadata has no {key}")
    return [str(item) for item in value]


def _numbers(metadata: Mapping[str, Value], key: str) -> list[float]:
    value = metadata.get(key, [])
    return [float(item) for item in value] if isinstance(value, list) else []
