"""Replies of the OpenAI API: from deltas to JSON documents and stream chunks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.choice import Delta, TextLogprob
from proxy.generation import Usage
from proxy.output_parser import ToolCallDelta
from proxy.request import FinishReason, GenerationRequest


@dataclass(slots=True)
class ChoiceResult:
    """A whole choice, gathered from its deltas."""

    index: int
    parts: list[str] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TextLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[TextLogprob] | None = None

    @property
    def text(self) -> str:
        """The text of all deltas."""
        return "".join(self.parts)

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.parts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.name:
                self.tool_calls.append(ToolCallDelta(call.index, call.id, call.name))
            self.tool_calls[-1].arguments += call.arguments
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason

    @property
    def mean_logprob(self) -> float:
        """Of the tokens; what best_of goes by."""
        values = [entry.logprob for entry in self.logprobs or () if entry.logprob is not None]
        return sum(values) / len(values) if values else float("-inf")


class Gathering:
    """Keeps all deltas: for whole replies."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self.choices = [ChoiceResult(index) for index in range(request.num_sequences)]
        self.usage = Usage(prompt_tokens=request.num_prompt_tokens)

    def push(self, delta: Delta) -> bool:
        """Add a delta to its choice."""
        self.choices[delta.index].add(delta)
        self.usage.add(delta, self._request)
        return True

    def push_text(self, index: int, text: str, token_ids: list[int]) -> bool:
        """Add text to a choice."""
        return self.push(Delta(index=index, text=text, token_ids=token_ids))

    async def ready(self) -> None:
        """Return at once: there is always room."""


def select_choices(
    choices: Sequence[ChoiceResult], request: GenerationRequest
) -> Sequence[ChoiceResult]:
    """The choices to return: of each prompt the most likely ones per token, if best_of asked."""
    if request.num_returned == request.n:
        return choices
    selected: list[ChoiceResult] = []
    for first in range(0, len(choices), request.n):
        group = sorted(choices[first : first + request.n], key=lambda c: -c.mean_logprob)
        selected += group[: request.num_returned]
    for index, choice in enumerate(selected):
        choice.index = index
    return selected


class ResponseFormat(Protocol):
    """How one endpoint writes its replies."""

    def response(self, choices: Sequence[ChoiceResult], usage: Usage) -> dict[str, Any]:
        """The whole reply of a request that does not stream."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its first text; None for nothing."""

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One stream chunk."""

    def last_chunk(self) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""


class _Format:
    """What both endpoints share."""

    def __init__(self, request: GenerationRequest, *, prefix: str, kind: str) -> None:
        self._request = request
        self._opened: set[int] = set()
        self._head = {
            "id": f"{prefix}-{request.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": request.model,
        }

    def last_chunk(self) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""
        return {**self._head, "choices": []}

    def _prompt_ids(self, index: int) -> list[int]:
        return list(self._request.prompts[index // self._request.num_returned])

    def _whole_extras(self, choice: ChoiceResult) -> dict[str, Any]:
        """Fields of a whole choice that only some requests ask for."""
        return {"token_ids": choice.token_ids} if self._request.shows_token_ids else {}

    def _delta_extras(self, delta: Delta) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if delta.stop_reason is not None:
            extras["stop_reason"] = delta.stop_reason
        if self._request.shows_token_ids:
            extras["token_ids"] = delta.token_ids
        return extras

    def _is_first(self, index: int) -> bool:
        """Whether no chunk of this choice was built before."""
        if index in self._opened:
            return False
        self._opened.add(index)
        return True


class ChatFormat(_Format):
    """/v1/chat/completions."""

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request, prefix="chatcmpl", kind="chat.completion.chunk")

    def response(self, choices: Sequence[ChoiceResult], usage: Usage) -> dict[str, Any]:
        """The whole reply of a request that does not stream."""
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": choice.index,
                    "message": _message(choice),
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": _reason(choice.finish_reason),
                    "stop_reason": choice.stop_reason,
                    **self._whole_extras(choice),
                }
                for choice in choices
            ],
            "usage": usage_body(usage),
        }
        if self._request.shows_token_ids:
            body["prompt_token_ids"] = self._prompt_ids(0)
        if self._request.shows_prompt_logprobs:
            body["prompt_logprobs"] = _prompt_logprobs(choices[0].prompt_logprobs)
        return body

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role, as OpenAI's first chunk has it."""
        chunk = self._chunk(index, {"role": "assistant", "content": ""}, None, None, {})
        if self._request.shows_token_ids:
            chunk["prompt_token_ids"] = self._prompt_ids(index)
        return chunk

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One stream chunk."""
        content: dict[str, Any] = {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.text or not (delta.reasoning or delta.tool_calls or delta.finish_reason):
            content["content"] = delta.text
        if delta.tool_calls:
            content["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        return self._chunk(
            delta.index,
            content,
            self._logprobs(delta.logprobs),
            delta.finish_reason,
            self._delta_extras(delta),
        )

    def _logprobs(self, entries: list[TextLogprob] | None) -> dict[str, Any] | None:
        if entries is None or not self._request.shows_logprobs:
            return None
        return _chat_logprobs(entries, as_ids=self._request.tokens_as_ids)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish_reason: FinishReason | None,
        extras: dict[str, Any],
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": _reason(finish_reason),
            **extras,
        }
        return {**self._head, "choices": [choice]}


class CompletionFormat(_Format):
    """/v1/completions."""

    def __init__(self, request: GenerationRequest) -> None:
        super().__init__(request, prefix="cmpl", kind="text_completion")

    def response(self, choices: Sequence[ChoiceResult], usage: Usage) -> dict[str, Any]:
        """The whole reply of a request that does not stream."""
        return {
            **self._head,
            "choices": [
                {
                    "index": choice.index,
                    "text": choice.text,
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": _reason(choice.finish_reason),
                    "stop_reason": choice.stop_reason,
                    **self._whole_extras(choice),
                }
                for choice in choices
            ],
            "usage": usage_body(usage),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """Text completions have none."""
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One stream chunk."""
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": _reason(delta.finish_reason),
            **self._delta_extras(delta),
        }
        if self._request.shows_token_ids and self._is_first(delta.index):
            choice["prompt_token_ids"] = self._prompt_ids(delta.index)
        return {**self._head, "choices": [choice]}

    def _whole_extras(self, choice: ChoiceResult) -> dict[str, Any]:
        extras = super()._whole_extras(choice)
        if self._request.shows_token_ids:
            extras["prompt_token_ids"] = self._prompt_ids(choice.index)
        if self._request.shows_prompt_logprobs:
            extras["prompt_logprobs"] = _prompt_logprobs(choice.prompt_logprobs)
        return extras

    def _logprobs(self, entries: list[TextLogprob] | None) -> dict[str, Any] | None:
        if entries is None or not self._request.shows_logprobs:
            return None
        return _completion_logprobs(entries, as_ids=self._request.tokens_as_ids)


def _message(choice: ChoiceResult) -> dict[str, Any]:
    has_content = choice.text or not choice.tool_calls
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text if has_content else None,
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in choice.tool_calls
        ]
    return message


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _prompt_logprobs(
    entries: list[TextLogprob] | None,
) -> list[dict[str, dict[str, Any]] | None] | None:
    """In vLLM's form: nothing for the first token; else the token itself and the likeliest."""
    if entries is None:
        return None
    result: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry.logprob is None:
            result.append(None)
            continue
        found: dict[str, dict[str, Any]] = {
            str(token_id): {
                "logprob": logprob,
                "rank": rank,
                "decoded_token": data.decode(errors="replace"),
            }
            for rank, (token_id, data, logprob) in enumerate(entry.top, 1)
        }
        own = {"logprob": entry.logprob, "rank": None, "decoded_token": entry.token}
        found.setdefault(str(entry.token_id), own)
        result.append(found)
    return result


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value


def _chat_logprobs(entries: list[TextLogprob], *, as_ids: bool) -> dict[str, Any]:
    def spell(token_id: int, data: bytes) -> str:
        return f"token_id:{token_id}" if as_ids else data.decode(errors="replace")

    return {
        "content": [
            {
                "token": spell(entry.token_id, entry.data),
                "logprob": entry.logprob,
                "bytes": list(entry.data),
                "top_logprobs": [
                    {"token": spell(token_id, data), "logprob": logprob, "bytes": list(data)}
                    for token_id, data, logprob in entry.top
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _completion_logprobs(entries: list[TextLogprob], *, as_ids: bool) -> dict[str, Any]:
    def spell(token_id: int, data: bytes) -> str:
        return f"token_id:{token_id}" if as_ids else _unique_text(data)

    def top_of(entry: TextLogprob) -> dict[str, float | None]:
        """Alternatives by text; the token itself is always among them."""
        top: dict[str, float | None] = {}
        for token_id, data, logprob in entry.top:
            top.setdefault(spell(token_id, data), logprob)
        top.setdefault(spell(entry.token_id, entry.data), entry.logprob)
        return top

    return {
        "tokens": [spell(entry.token_id, entry.data) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [None if entry.logprob is None else top_of(entry) for entry in entries],
        "text_offset": [entry.text_offset for entry in entries],
    }


def _unique_text(data: bytes) -> str:
    """The text of a token; part of a character is spelled `bytes:\\xNN`, as at OpenAI."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
