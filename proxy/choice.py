"""One choice of a request: token events in, text deltas out."""

from collections import deque
from dataclasses import dataclass

from proxy.detokenizer import Detokenizer
from proxy.output_parser import OutputParser, ToolCallDelta
from proxy.request import FinishReason, GenerationRequest, TokenEvent, TokenLogprobs
from proxy.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """One token as text, with its log-probability and the alternatives at its position."""

    token_id: int
    data: bytes
    """The token's bytes; may be part of a character."""
    logprob: float | None
    """None for the first token of an echoed prompt."""
    text_offset: int
    top: tuple[tuple[int, bytes, float], ...] = ()

    @property
    def token(self) -> str:
        """The token as text; bytes that are no UTF-8 of their own become U+FFFD."""
        return self.data.decode(errors="replace")


@dataclass(kw_only=True, slots=True)
class Delta:
    """What one choice gained. Nobody changes it; it is not frozen because that would cost more."""

    index: int
    token_ids: list[int]
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: list[TextLogprob] | None = None
    """None when not asked for."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the stop token's id, that ended the choice."""
    num_cached_tokens: int | None = None
    """In the first delta."""
    prompt_logprobs: list[TextLogprob] | None = None
    """In the first delta, if asked for: one per prompt token."""

    @property
    def is_only_text(self) -> bool:
        """Whether there is text, and nothing else to show."""
        return bool(self.text) and not (
            self.reasoning
            or self.tool_calls
            or self.logprobs is not None
            or self.finish_reason is not None
        )

    @property
    def is_visible(self) -> bool:
        """Whether a client has anything to see here."""
        return bool(
            self.text
            or self.reasoning
            or self.tool_calls
            or self.logprobs
            or self.finish_reason is not None
        )


class ChoiceText:
    """Builds the deltas of one choice, and knows when a stop string ended it."""

    __slots__ = (
        "_detokenizer",
        "_has_logprobs",
        "_held_logprobs",
        "_is_first",
        "_is_plain",
        "_num_tokens",
        "_offset",
        "_parser",
        "_prompt_token_ids",
        "_request",
        "_skipped_ids",
        "_tokenizer",
        "index",
        "is_finished",
    )

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        *,
        index: int,
        prompt_token_ids: tuple[int, ...],
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self.index = index
        self._prompt_token_ids = prompt_token_ids
        self._skipped_ids = (
            tokenizer.special_ids if request.skip_special_tokens else frozenset[int]()
        )
        output = request.output
        self._parser = None if output is None else OutputParser(output)
        if output is not None:
            self._skipped_ids -= output.kept_ids
        self._detokenizer = Detokenizer(
            tokenizer.token_bytes,
            skipped_ids=self._skipped_ids,
            stop=request.stop,
            include_stop=request.include_stop,
        )
        self._has_logprobs = request.sampling.num_logprobs is not None
        self._held_logprobs: deque[tuple[int, TextLogprob]] = deque()
        self._offset = 0
        self._num_tokens = 0
        self._is_first = True
        has_more = output is not None or self._has_logprobs or bool(request.stop)
        self._is_plain = not (has_more or request.drop_output)
        self.is_finished = False

    def push(self, event: TokenEvent) -> Delta:
        """Take the next event; tokens after a stop string are dropped and not counted."""
        text, token_ids = "", list[int]()
        logprobs: list[TextLogprob] = []
        if self._is_first and self._request.echo:
            text = self._echo(event, logprobs)
        last = len(event.token_ids) - 1
        ids = [] if self._request.drop_output else event.token_ids
        for i, token_id in enumerate(ids):
            start = self._detokenizer.num_chars
            # The token that ended the text is no part of it.
            if not (event.finish_reason is FinishReason.STOP and i == last):
                may_stop = self._num_tokens >= self._request.sampling.min_tokens
                text += self._detokenizer.push(token_id, may_stop=may_stop)
            self._num_tokens += 1
            token_ids.append(token_id)
            if self._has_logprobs and event.logprobs is not None and i < len(event.logprobs):
                entry = self._text_logprob(event.logprobs[i], self._offset + start)
                self._held_logprobs.append((start, entry))
            if self._detokenizer.matched_stop is not None:
                break
        matched = self._detokenizer.matched_stop
        finish_reason = event.finish_reason if matched is None else FinishReason.STOP
        if self._request.drop_output:
            finish_reason = FinishReason.LENGTH
        stop_reason: str | int | None = matched
        if finish_reason is not None:
            self.is_finished = True
            text += self._detokenizer.finish()
            stopping = matched is None and finish_reason is FinishReason.STOP and token_ids
            if stopping and token_ids[-1] in self._request.sampling.stop_token_ids:
                stop_reason = token_ids[-1]
        self._release_logprobs(logprobs, is_last=finish_reason is not None and matched is None)
        prompt_logprobs = None
        if self._is_first and self._request.shows_prompt_logprobs:
            prompt_logprobs = self._prompt_entries(event)
        self._is_first = False
        reasoning, calls = "", tuple[ToolCallDelta, ...]()
        if self._parser is not None:
            parsed = self._parser.push(text, is_last=finish_reason is not None)
            reasoning, text, calls = parsed.reasoning, parsed.content, tuple(parsed.calls)
            if (
                finish_reason is FinishReason.STOP
                and self._parser.has_calls
                and not self._parser.options.is_named
            ):
                finish_reason = FinishReason.TOOL_CALLS
        return Delta(
            index=self.index,
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            prompt_logprobs=prompt_logprobs,
            token_ids=token_ids,
            logprobs=logprobs if self._has_logprobs else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            num_cached_tokens=event.num_cached_tokens,
        )

    def plain_text(self, token_ids: list[int]) -> str | None:
        """Take tokens with nothing else to their event; their text.

        None, and nothing is taken, where it may be more than the next of the text, or not yet that.
        """
        if not self._is_plain or self._is_first:
            return None
        push = self._detokenizer.push
        return push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))

    def _release_logprobs(self, released: list[TextLogprob], *, is_last: bool) -> None:
        """Move the entries whose text was sent; after a stop string the rest is dropped."""
        num_sent = self._detokenizer.num_sent
        while self._held_logprobs:
            start, entry = self._held_logprobs[0]
            following = self._held_logprobs[1][0] if len(self._held_logprobs) > 1 else None
            end = self._detokenizer.num_chars if following is None else following
            is_cut = self._detokenizer.matched_stop is not None and start < num_sent
            if not (is_last or end <= num_sent or is_cut):
                return
            released.append(entry)
            self._held_logprobs.popleft()

    def _prompt_entries(self, event: TokenEvent) -> list[TextLogprob]:
        entries = [None, *(event.prompt_logprobs or [])]
        return [
            TextLogprob(token_id, self._bytes(token_id), None, 0)
            if entry is None
            else self._text_logprob(entry, 0)
            for token_id, entry in zip(self._prompt_token_ids, entries, strict=False)
        ]

    def _echo(self, event: TokenEvent, logprobs: list[TextLogprob]) -> str:
        prompt = Detokenizer(self._tokenizer.token_bytes, skipped_ids=self._skipped_ids)
        entries = [None, *(event.prompt_logprobs or [])]
        text = ""
        for i, token_id in enumerate(self._prompt_token_ids):
            entry = entries[i] if i < len(entries) else None
            if self._has_logprobs:
                logprobs.append(
                    TextLogprob(token_id, self._bytes(token_id), None, prompt.num_chars)
                    if entry is None
                    else self._text_logprob(entry, prompt.num_chars)
                )
            text += prompt.push(token_id)
        text += prompt.finish()
        if self._tokenizer.strips_leading_space:
            text = text.removeprefix(" ")
        self._offset = len(text)
        return text

    def _text_logprob(self, entry: TokenLogprobs, text_offset: int) -> TextLogprob:
        return TextLogprob(
            entry.token_id,
            self._bytes(entry.token_id),
            entry.logprob,
            text_offset,
            tuple((i, self._bytes(i), logprob) for i, logprob in entry.top),
        )

    def _bytes(self, token_id: int) -> bytes:
        known = token_id < self._tokenizer.vocab_size
        return self._tokenizer.token_bytes[token_id] if known else b""
