"""Incremental text: UTF-8 boundaries and stop strings, for any split."""

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from proxy.detokenizer import Detokenizer, StopMatcher
from proxy.tokenizer import Tokenizer, load_tokenizer

# Every byte is a token: the worst split that there is.
BYTES = [bytes([byte]) for byte in range(256)]


def run(
    data: bytes, stop: list[str], *, include_stop: bool = False
) -> tuple[list[str], str | None]:
    detokenizer = Detokenizer(BYTES, stop=stop, include_stop=include_stop)
    pieces = []
    for byte in data:
        pieces.append(detokenizer.push(byte))
        if detokenizer.matched_stop is not None:
            break
    pieces.append(detokenizer.finish())
    assert detokenizer.num_sent == len("".join(pieces))
    return pieces, detokenizer.matched_stop


def reference(text: str, stop: list[str]) -> str:
    """Cut at the stop string whose end comes first; of those, at the longest."""
    ends = [(text.find(s) + len(s), -len(s)) for s in stop if s in text]
    if not ends:
        return text
    end, negative_length = min(ends)
    return text[: end + negative_length]


@given(
    st.text(alphabet="abé東🙂"), st.lists(st.text("abé東🙂", min_size=1, max_size=4), max_size=4)
)
def test_text_and_stop_strings_are_exact_for_byte_tokens(text: str, stop: list[str]) -> None:
    pieces, matched = run(text.encode(), stop)
    assert "".join(pieces) == reference(text, stop)
    assert (matched is not None) == any(s in text for s in stop)


@given(st.binary())
def test_bytes_that_are_no_text_become_replacement_characters(data: bytes) -> None:
    pieces, _ = run(data, [])
    assert "".join(pieces) == data.decode(errors="replace")


@given(st.text("ab"), st.text("ab", min_size=1, max_size=6))
def test_the_matcher_agrees_with_find(text: str, stop: str) -> None:
    matcher = StopMatcher(stop)
    for end, char in enumerate(text, start=1):
        if matcher.feed(char):
            assert end == text.find(stop) + len(stop)
            return
    assert stop not in text


def test_included_stop_strings_are_kept() -> None:
    pieces, matched = run(b"one STOP two", ["STOP"], include_stop=True)
    assert ("".join(pieces), matched) == ("one STOP", "STOP")


def test_nothing_is_sent_that_may_become_a_stop_string() -> None:
    detokenizer = Detokenizer(BYTES, stop=["STOP"])
    assert [detokenizer.push(byte) for byte in b"aSTOx"] == ["a", "", "", "", "STOx"]


def test_a_repeated_prefix_is_released_as_soon_as_it_is_safe() -> None:
    detokenizer = Detokenizer(BYTES, stop=["aab"])
    assert [detokenizer.push(byte) for byte in b"aaaa"] == ["", "", "a", "a"]
    assert detokenizer.finish() == "aa"


# The vocabulary lacks some bytes: control characters, and lead bytes of unassigned planes.
_KNOWN = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_categories=["Cc"])


@settings(max_examples=100)
@given(st.text(_KNOWN))
def test_any_text_survives_the_packaged_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer.token_bytes)
    pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode(text)]
    assert "".join([*pieces, detokenizer.finish()]) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text


def sentencepiece_folder(folder: Path) -> Path:
    """A tokenizer with byte fallback and a space marker, as Llama 2 has it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdehlnotw", "\u2581t", "he", "\u2581the", "é", "東", "\u2581\u2581"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("\u2581", "\u2581")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(sentencepiece_folder(tmp_path_factory.mktemp("sentencepiece")))


# The marker itself cannot be told from a space: the tokenizer loses it, not we.
_NO_MARKER = st.characters(codec="utf-8", exclude_characters="\u2581")


@settings(max_examples=150)
@given(
    text=st.text(_NO_MARKER) | st.text("the  東é🙂\n", max_size=30),
    stop=st.lists(st.text("the 東🙂", min_size=1, max_size=3), max_size=2),
)
def test_text_and_stop_strings_are_exact_for_sentencepiece(
    sentencepiece: Tokenizer, text: str, stop: list[str]
) -> None:
    token_ids = sentencepiece.encode(text, add_special_tokens=False)
    assert sentencepiece.decode(token_ids) == text
    detokenizer = Detokenizer(sentencepiece.token_bytes, stop=stop)
    pieces = []
    for token_id in token_ids:
        pieces.append(detokenizer.push(token_id))
        if detokenizer.matched_stop is not None:
            break
    pieces.append(detokenizer.finish())
    # The space that the tokenizer puts before the first word is there for a continuation.
    spelled = f" {text}" if token_ids else text
    assert "".join(pieces) == reference(spelled, stop)
    assert (detokenizer.matched_stop is not None) == any(s in spelled for s in stop)


@given(st.data())
def test_special_tokens_are_skipped_or_spelled_anywhere(
    sentencepiece: Tokenizer, data: st.DataObject
) -> None:
    text = data.draw(st.text("the 東🙂é"))
    token_ids = sentencepiece.encode(text, add_special_tokens=False)
    places = data.draw(st.lists(st.integers(0, len(token_ids)), max_size=3))
    skipping = Detokenizer(sentencepiece.token_bytes, skipped_ids=sentencepiece.special_ids)
    mixed = list(token_ids)
    for place in sorted(places, reverse=True):
        mixed.insert(place, data.draw(st.sampled_from(sorted(sentencepiece.special_ids))))
    shown = "".join([*map(skipping.push, mixed), skipping.finish()])
    assert shown == (f" {text}" if token_ids else text)
