"""Which tokens a request's grammar allows next.

    prepare(requests)            before the forward pass: matchers catch up, masks are computed
      ... the model runs ...     meanwhile, on a thread of their own (the library drops the GIL)
    masks(requests)              before sampling: wait for the thread, collect the masks
    forget(key)

A matcher's state is the request's output and nothing else. It is built by replaying that output, so
it survives the handoff from prefill to decode, a preemption, and a migration to another worker.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from engine.errors import EngineError
from engine.request import Request, RequestKey
from engine.weights.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The rows of a batch that have a grammar, and what each allows."""

    rows: list[int]
    allowed: NDArray[np.bool_]
    """[len(rows), V]."""


@dataclass(slots=True, eq=False)
class _State:
    """One request; the fields below `num_sent` belong to the thread."""

    request: Request
    num_sent: int = -1
    """Output tokens handed to the thread; -1: not even the grammar."""
    matcher: LLMatcher | None = None
    bits: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    """One bit per token, lowest first."""
    error: str = ""


class Grammars:
    """The grammars of the requests that one engine loop holds."""

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._states: dict[RequestKey, _State] = {}
        self._limits = LLParserLimits(verbose_errors=False)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tokenizer: Future[LLTokenizer | str] = self._pool.submit(self._load, load)
        self._last: Future[None] | None = None

    def prepare(self, requests: Sequence[Request]) -> None:
        """Begin to compute the masks for the next token of those that have a grammar."""
        work = []
        for request in requests:
            if not request.sampling.grammar:
                continue
            state = self._states.get(request.key)
            if state is None:
                state = self._states[request.key] = _State(request)
            if state.num_sent != request.num_output_tokens:
                first = request.num_prompt_tokens + max(0, state.num_sent)
                work.append((state, request.token_ids[first:]))
                state.num_sent = request.num_output_tokens
        if work:
            self._last = self._pool.submit(self._advance, work)

    def masks(self, requests: Sequence[Request]) -> TokenMasks | None:
        """Masks for the next token of `requests`, all of which were prepared; None: no grammar.

        A request whose grammar failed may only end; `error` tells.
        """
        rows = [row for row, request in enumerate(requests) if request.sampling.grammar]
        if not rows:
            return None
        if self._last is not None:
            self._last.result()
        states = [self._states[requests[row].key] for row in rows]
        bits = np.stack([state.bits for state in states])
        allowed = np.unpackbits(bits, axis=1, count=self._vocab_size, bitorder="little")
        return TokenMasks(rows, allowed.astype(np.bool_))

    def next_masks(self, requests: Sequence[Request]) -> TokenMasks | None:
        """`masks` of requests that may have got tokens since `prepare`."""
        self.prepare(requests)
        return self.masks(requests)

    def error(self, key: RequestKey) -> str:
        """Why the request cannot go on; empty: it can. After `masks`."""
        state = self._states.get(key)
        return "" if state is None else state.error

    def forget(self, key: RequestKey) -> None:
        """Drop what is kept for a request."""
        self._states.pop(key, None)

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, load: Callable[[], Vocabulary]) -> LLTokenizer | str:
        try:
            vocabulary = load()
        except EngineError as error:
            return str(error)
        if not self._eos_token_ids:
            return "the model has no end-of-sequence token"
        return make_tokenizer(vocabulary, self._vocab_size, self._eos_token_ids)

    def _advance(self, work: list[tuple[_State, list[int]]]) -> None:
        for state, token_ids in work:
            self._advance_one(state, token_ids)

    def _advance_one(self, state: _State, token_ids: list[int]) -> None:
        if state.matcher is None and not state.error:
            tokenizer = self._tokenizer.result()
            if isinstance(tokenizer, str):
                state.error = tokenizer
            else:
                grammar = state.request.sampling.grammar
                state.matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        if state.matcher is not None and not state.error:
            state.matcher.consume_tokens(token_ids)
            mask = np.frombuffer(state.matcher.compute_bitmask(), np.uint8)
            if state.matcher.is_error():
                state.error = state.matcher.get_error().partition("\n")[0] or "it does not match"
            elif not mask.any():
                state.error = "it allows no token"
            else:
                num_bytes = -(-self._vocab_size // 8)
                state.bits = np.zeros(num_bytes, np.uint8)
                state.bits[: len(mask)] = mask[:num_bytes]
        if state.error:
            state.bits = self._only_the_end()

    def _only_the_end(self) -> NDArray[np.uint8]:
        bits = np.zeros(self._vocab_size, np.uint8)
        bits[self._eos_token_ids or [0]] = 1
        return np.packbits(bits, bitorder="little")


class _Wrapped:
    """What the library wants to know of a tokenizer."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = vocabulary.token_bytes
        self.special_token_ids = sorted(vocabulary.special_ids | {eos_token_id})
        special = frozenset(self.special_token_ids)
        self._ids = {t: i for i, t in enumerate(self.tokens) if t and i not in special}
        self._max_length = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize by the longest match: text that a grammar forces would get these tokens.

        NOTE: the proxy's grammars say no_forcing, so that the model keeps its own choice of tokens.
        """
        data = text.encode() if isinstance(text, str) else text
        ids, start = [], 0
        while start < len(data):
            for end in range(min(len(data), start + self._max_length), start, -1):
                if (token_id := self._ids.get(data[start:end])) is not None:
                    ids.append(token_id)
                    break
            start = max(start + 1, end)
        return ids


def make_tokenizer(
    vocabulary: Vocabulary, vocab_size: int, eos_token_ids: Sequence[int]
) -> LLTokenizer:
    """A vocabulary in the library's form; ids beyond it, up to vocab_size, are never allowed."""
    tokens = vocabulary.token_bytes[:vocab_size]
    tokens = [*tokens, *[b""] * (vocab_size - len(tokens))]
    wrapped = _Wrapped(Vocabulary(tokens, vocabulary.special_ids), eos_token_ids[0])
    return LLTokenizer(TokenizerWrapper(wrapped), n_vocab=vocab_size, eos_token=list(eos_token_ids))
