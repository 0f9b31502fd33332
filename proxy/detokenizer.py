"""Token ids of one running sequence to text that is safe to send.

Held back until decided: bytes of an unfinished UTF-8 character, and text that may turn out to be
the start of a stop string. What was returned is never taken back, and a stop string is never
returned in part.
"""

import codecs
from collections.abc import Sequence


class StopMatcher:
    """Finds one stop string in a text fed character by character, in constant time per character.

    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings", 1977.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Length of the longest suffix of the text that starts the stop string."""
        self._fallback = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[i] == stop[length]
            self._fallback[i] = length

    def feed(self, char: str) -> bool:
        """Take the next character; True when the text now ends with the stop string."""
        stop = self.stop
        while self.num_matched and char != stop[self.num_matched]:
            self.num_matched = self._fallback[self.num_matched - 1]
        if char == stop[self.num_matched]:
            self.num_matched += 1
        return self.num_matched == len(stop)


class Detokenizer:
    """Incremental text of one sequence; `push` one token at a time, `finish` once.

    `num_chars` counts all text so far, held back or not; `num_sent` what was returned.
    """

    __slots__ = (
        "_decoder",
        "_held",
        "_include_stop",
        "_is_amid_char",
        "_matchers",
        "_num_unsent",
        "_skipped_ids",
        "_token_bytes",
        "matched_stop",
        "num_chars",
    )

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        *,
        skipped_ids: frozenset[int] = frozenset(),
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_amid_char = False
        """Whether the decoder has bytes of a character that is not complete."""
        self._matchers = tuple(StopMatcher(text) for text in stop)
        self._include_stop = include_stop
        self._held = ""
        self.num_chars = 0
        self._num_unsent = 0
        """Characters held back, or after the stop string."""
        self.matched_stop: str | None = None

    @property
    def num_sent(self) -> int:
        """Characters returned so far."""
        return self.num_chars - self._num_unsent

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take a token; return the text that became safe. Ignored once a stop string matched.

        Text of a token that may not stop is no part of any stop string (min_tokens).
        """
        if self.matched_stop is not None or token_id in self._skipped_ids:
            return ""
        known = token_id < len(self._token_bytes)
        text = self._decode(self._token_bytes[token_id] if known else b"")
        if may_stop and self._matchers:
            return self._match(text)
        self.num_chars += len(text)
        return text

    def finish(self) -> str:
        """Return what was still held back; nothing can follow."""
        if self.matched_stop is not None:
            return ""
        text = self._match(self._decoder.decode(b"", final=True)) + self._held
        if self.matched_stop is None:
            self._held, self._num_unsent = "", 0
        return text

    def _decode(self, data: bytes) -> str:
        # NOTE: most tokens are whole characters, and need no decoder, which takes longer.
        if not self._is_amid_char:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._is_amid_char = bool(self._decoder.getstate()[0])
        return text

    def _match(self, text: str) -> str:
        self.num_chars += len(text)
        held = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            ended = [matcher.stop for matcher in self._matchers if matcher.feed(char)]
            if ended:
                self.matched_stop = max(ended, key=len)
                keep = end if self._include_stop else end - len(self.matched_stop)
                self._held, self._num_unsent = "", len(held) - keep
                return held[:keep]
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        cut = len(held) - num_held
        self._held, self._num_unsent = held[cut:], num_held
        return held[:cut]
