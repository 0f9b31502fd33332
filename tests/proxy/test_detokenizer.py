"""Incremental text: UTF-8 boundaries and stop strings, for any split."""

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.detokenizer import Detokenizer, StopMatcher
from proxy.tokenizer import Tokenizer

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
