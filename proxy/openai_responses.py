"""Replies of the OpenAI API: from deltas to JSON documents and stream chunks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.choice import Delta, TextLogprob
from proxy.generation import Usage
from proxy.request import FinishReason, GenerationRequest


@dataclass(slots=True)
class ChoiceResult:
    """A whole choice, gathered from its deltas."""

    index: int
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TextLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """The text of all deltas."""
        return "".join(self.parts)

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.parts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


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


class ChatFormat:
    """/v1/chat/completions."""

    def __init__(self, request: GenerationRequest) -> None:
        self._head = {
            "id": f"chatcmpl-{request.request_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }

    def response(self, choices: Sequence[ChoiceResult], usage: Usage) -> dict[str, Any]:
        """The whole reply of a request that does not stream."""
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": _chat_logprobs(choice.logprobs),
                    "finish_reason": _reason(choice.finish_reason),
                    "stop_reason": choice.stop_reason,
                }
                for choice in choices
            ],
            "usage": usage_body(usage),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role, as OpenAI's first chunk has it."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None, None)

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One stream chunk."""
        return self._chunk(
            delta.index,
            {"content": delta.text} if delta.text or delta.finish_reason is None else {},
            _chat_logprobs(delta.logprobs),
            delta.finish_reason,
            delta.stop_reason,
        )

    def last_chunk(self) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""
        return {**self._head, "choices": []}

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
        logprobs: dict[str, Any] | None,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": _reason(finish_reason),
        }
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        return {**self._head, "choices": [choice]}


class CompletionFormat:
    """/v1/completions."""

    def __init__(self, request: GenerationRequest) -> None:
        self._head = {
            "id": f"cmpl-{request.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }

    def response(self, choices: Sequence[ChoiceResult], usage: Usage) -> dict[str, Any]:
        """The whole reply of a request that does not stream."""
        return {
            **self._head,
            "choices": [
                {
                    "index": choice.index,
                    "text": choice.text,
                    "logprobs": _completion_logprobs(choice.logprobs),
                    "finish_reason": _reason(choice.finish_reason),
                    "stop_reason": choice.stop_reason,
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
            "logprobs": _completion_logprobs(delta.logprobs),
            "finish_reason": _reason(delta.finish_reason),
        }
        if delta.stop_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return {**self._head, "choices": [choice]}

    def last_chunk(self) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""
        return {**self._head, "choices": []}


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


def _chat_logprobs(entries: list[TextLogprob] | None) -> dict[str, Any] | None:
    if entries is None:
        return None
    return {
        "content": [
            {
                "token": entry.token,
                "logprob": entry.logprob,
                "bytes": list(entry.data),
                "top_logprobs": [
                    {
                        "token": data.decode(errors="replace"),
                        "logprob": logprob,
                        "bytes": list(data),
                    }
                    for _, data, logprob in entry.top
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _completion_logprobs(entries: list[TextLogprob] | None) -> dict[str, Any] | None:
    if entries is None:
        return None
    return {
        "tokens": [_unique_text(entry.data) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            None if entry.logprob is None else _top_logprobs(entry) for entry in entries
        ],
        "text_offset": [entry.text_offset for entry in entries],
    }


def _top_logprobs(entry: TextLogprob) -> dict[str, float | None]:
    """Alternatives by text; the token itself is always among them."""
    top: dict[str, float | None] = {}
    for _, data, logprob in entry.top:
        top.setdefault(_unique_text(data), logprob)
    top.setdefault(_unique_text(entry.data), entry.logprob)
    return top


def _unique_text(data: bytes) -> str:
    """The text of a token; part of a character is spelled `bytes:\\xNN`, as at OpenAI."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
