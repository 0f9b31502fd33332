"""Answer one generation request over HTTP, whole or as server-sent events.

A status is sent only after the first event of a worker. An error before it is an HTTP error; one
after it is a last `data: {"error": ...}` event, and the stream ends without `[DONE]`.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from proxy.auth import Account
from proxy.choice import Delta
from proxy.errors import (
    ClientDisconnected,
    InternalError,
    ProxyError,
    Unauthenticated,
    Unavailable,
)
from proxy.generation import Usage
from proxy.http_body import WriteWatch, cancel_on_disconnect
from proxy.openai_responses import ChoiceResult, ResponseFormat, select_choices, usage_body
from proxy.request import GenerationRequest, Progress
from proxy.service import Service

logger = logging.getLogger(__name__)

# A reply with more of them is built in a thread: it would keep other streams waiting.
_MAX_INLINE_LOGPROBS = 2048
_DONE = b"data: [DONE]\n\n"
# A text that stands nowhere else in an event: model names may hold anything but control characters.
_SAMPLE = "\x00text\x00"
_SAMPLE_JSON = orjson.dumps(_SAMPLE)
_SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class GenerationResponse:
    """An ASGI application that runs one validated request and sends what comes of it."""

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        response_format: ResponseFormat,
        *,
        account: Account,
        api: str,
        is_stream: bool,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self._service = service
        self._request = request
        self._format = response_format
        self._account = account
        self._api = api
        self._is_stream = is_stream
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._usage = Usage(prompt_tokens=request.num_prompt_tokens)
        self._has_started = False
        self._plain: dict[int, tuple[bytes, bytes]] = {}
        """By choice: what stands before and after the text of an event with nothing else."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run to the end, whatever it is; nothing is left at the workers afterwards."""
        progress = Progress()
        error: BaseException | None = None
        try:
            timeout_s = self._service.config.client_write_timeout_s
            async with (
                cancel_on_disconnect(receive, timeout_s) as writes,
                self._service.open(self._request, progress, self._account) as deltas,
            ):
                if self._is_stream:
                    await self._stream(deltas, send, writes)
                else:
                    body = await self._gather(deltas)
            # NOTE: the last bytes go out when nothing can be cancelled any more: the server
            # reports a finished response as a disconnect.
            if self._is_stream:
                await self._write_last(send, self._ending())
            else:
                await send_json(send, 200, body, [_request_id(self._request)])
        except ProxyError as failure:
            error = failure
            await self._send_error(send, failure)
        except ClientDisconnected as failure:
            error = failure
        except asyncio.CancelledError:
            # A client that left is a ClientDisconnected: this is the end of the service.
            error = Unavailable("the service is shutting down", retry_after_s=1.0)
            await self._send_error(send, error)
        except Exception as failure:  # outermost: the client must get an answer
            error = failure
            logger.exception("request %s failed", self._request.request_id)
            await self._send_error(send, InternalError("internal error"))
        finally:
            self._service.count(self._api, progress, error)

    async def _gather(self, deltas: AsyncGenerator[Delta, None]) -> dict[str, Any]:
        choices = [ChoiceResult(index) for index in range(self._request.num_sequences)]
        async for delta in deltas:
            choices[delta.index].add(delta)
            self._usage.add(delta, self._request)
        selected = select_choices(choices, self._request)
        num_logprobs = sum(len(choice.logprobs or ()) for choice in selected)
        if num_logprobs <= _MAX_INLINE_LOGPROBS:
            return self._format.response(selected, self._usage)
        return await asyncio.to_thread(self._format.response, selected, self._usage)

    async def _stream(
        self, deltas: AsyncGenerator[Delta, None], send: Send, writes: WriteWatch
    ) -> None:
        loop = asyncio.get_running_loop()
        opened: set[int] = set()
        async for delta in deltas:
            self._usage.add(delta, self._request)
            events = b""
            if delta.index not in opened:
                opened.add(delta.index)
                opening = self._format.opening(delta.index)
                if opening is not None:
                    events = self._event(opening)
            if delta.is_visible or self._request.shows_token_ids:
                events += self._text_event(delta) or self._event(self._format.chunk(delta))
            if not events:
                continue
            writes.began_s = loop.time()
            if not self._has_started:
                self._has_started = True
                headers = [*_SSE_HEADERS, _request_id(self._request)]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": events, "more_body": True})
            writes.began_s = None

    def _text_event(self, delta: Delta) -> bytes | None:
        """The event of a delta that is text and nothing else, as most are; None for others."""
        if self._continuous_usage or self._request.shows_token_ids or not delta.is_only_text:
            return None
        plain = self._plain.get(delta.index)
        if plain is None:
            sample = Delta(index=delta.index, text=_SAMPLE, token_ids=[])
            before, _, after = self._event(self._format.chunk(sample)).partition(_SAMPLE_JSON)
            plain = self._plain[delta.index] = (before, after)
        return plain[0] + orjson.dumps(delta.text) + plain[1]

    def _event(self, chunk: dict[str, Any]) -> bytes:
        if self._continuous_usage:
            chunk["usage"] = usage_body(self._usage)
        elif self._include_usage:
            chunk["usage"] = None
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _ending(self) -> bytes:
        if not self._include_usage:
            return _DONE
        chunk = {**self._format.last_chunk(), "usage": usage_body(self._usage)}
        return b"data: " + orjson.dumps(chunk) + b"\n\n" + _DONE

    async def _write_last(self, send: Send, data: bytes) -> None:
        """End a stream that has begun.

        Raises: ClientDisconnected: the client took nothing for client_write_timeout_s.
        """
        try:
            async with asyncio.timeout(self._service.config.client_write_timeout_s):
                await send({"type": "http.response.body", "body": data})
        except TimeoutError:
            raise ClientDisconnected("the client reads too slowly") from None

    async def _send_error(self, send: Send, error: ProxyError) -> None:
        if not self._has_started:
            await send_error(send, error)
            return
        event = b"data: " + orjson.dumps(error.body()) + b"\n\n"
        try:
            await self._write_last(send, event)
        except ClientDisconnected:
            return


def _request_id(request: GenerationRequest) -> tuple[bytes, bytes]:
    return (b"x-request-id", request.request_id.encode())


async def send_json(
    send: Send, status: int, body: object, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """Send a whole JSON reply."""
    data = orjson.dumps(body)
    all_headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
        *(headers or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": data})


async def send_error(send: Send, error: ProxyError) -> None:
    """Send an error as OpenAI does."""
    await send_json(send, error.status, error.body(), error_headers(error))


def error_headers(error: ProxyError) -> list[tuple[bytes, bytes]]:
    """Retry-After where it helps, and what a client has to show where it showed nothing."""
    if isinstance(error, Unauthenticated):
        return [(b"www-authenticate", b"Bearer")]
    if error.retry_after_s is None:
        return []
    return [(b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode())]
