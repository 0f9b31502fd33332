"""Answer one generation request over HTTP, whole or as server-sent events.

A status is sent only after the first event of a worker. An error before it is an HTTP error; one
after it is a last `data: {"error": ...}` event, and the stream ends without `[DONE]`.
"""

import asyncio
import logging
import math
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
from proxy.http_protocol import CHUNK_WRITER, ChunkWriter
from proxy.openai_responses import Gathering, ResponseFormat, select_choices, usage_body
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


class EventStream:
    """Sends deltas as server-sent events.

    Most events go straight to the connection (ChunkWriter). The first one, and those for a client
    that reads too slowly, wait for `ready`.
    """

    # NOTE: with a thousand streams, what a token touches is no longer in the caches of a core, and
    # to fetch it takes longer than to compute with it. Slots here and along the way keep it small.
    __slots__ = (
        "_continuous_usage",
        "_format",
        "_include_usage",
        "_is_direct",
        "_is_plain",
        "_opened",
        "_pending",
        "_plain",
        "_request",
        "_send",
        "_sending",
        "_writer",
        "has_started",
        "usage",
        "writes",
    )

    def __init__(
        self,
        request: GenerationRequest,
        response_format: ResponseFormat,
        send: Send,
        writer: ChunkWriter | None,
        *,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._request = request
        self._format = response_format
        self._send = send
        self._writer = writer
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self.usage = Usage(prompt_tokens=request.num_prompt_tokens)
        self._opened: set[int] = set()
        self._pending: list[bytes] = []
        self._sending = asyncio.Lock()
        self._is_direct = False
        """Whether events may go straight to the connection: none that would be before is kept."""
        self._is_plain = not (continuous_usage or request.shows_token_ids)
        self._plain: dict[int, tuple[bytes, bytes]] = {}
        """By choice: what stands before and after the text of an event with nothing else."""
        self.has_started = False
        """Whether the status was sent."""
        self.writes: WriteWatch | None = None
        """Told when a write begins and ends."""

    def push(self, delta: Delta) -> bool:
        """Send a delta, or keep it for `ready` and return False."""
        self.usage.add(delta, self._request)
        events = self._events(delta)
        return self._write(events) if events else True

    def push_text(self, index: int, text: str, token_ids: list[int]) -> bool:
        """Send text, or keep it for `ready` and return False."""
        plain = self._plain.get(index)
        if plain is None:
            return self.push(Delta(index=index, text=text, token_ids=token_ids))
        self.usage.completion_tokens += len(token_ids)
        return self._write(plain[0] + orjson.dumps(text) + plain[1]) if text else True

    def _write(self, events: bytes) -> bool:
        if self._is_direct and self._writer is not None and self._writer.write(events):
            return True
        self._is_direct = False
        self._pending.append(events)
        return False

    async def ready(self) -> None:
        """Send what was kept; return when the connection has taken it."""
        async with self._sending:
            if not self._pending:
                return
            if self.writes is not None:
                self.writes.began_s = asyncio.get_running_loop().time()
            if not self.has_started:
                headers = [*_SSE_HEADERS, _request_id(self._request)]
                start = {"type": "http.response.start", "status": 200, "headers": headers}
                await self._send(start)
                self.has_started = True
            body = {"type": "http.response.body", "body": self.take_pending(), "more_body": True}
            await self._send(body)
            if self.writes is not None:
                self.writes.began_s = None
            can_write = self._writer is not None and self._writer.is_usable
            self._is_direct = can_write and not self._pending

    def take_pending(self) -> bytes:
        """What was kept and not sent."""
        events = b"".join(self._pending)
        self._pending.clear()
        return events

    def ending(self) -> bytes:
        """What follows the last delta."""
        if not self._include_usage:
            return _DONE
        chunk = {**self._format.last_chunk(), "usage": usage_body(self.usage)}
        return b"data: " + orjson.dumps(chunk) + b"\n\n" + _DONE

    def _events(self, delta: Delta) -> bytes:
        events = b""
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            opening = self._format.opening(delta.index)
            if opening is not None:
                events = self._event(opening)
        plain = self._plain.get(delta.index)
        if plain is not None and delta.is_only_text:
            return events + plain[0] + orjson.dumps(delta.text) + plain[1]
        if delta.is_visible or self._request.shows_token_ids:
            events += self._event(self._format.chunk(delta))
            if self._is_plain and plain is None:
                self._plain[delta.index] = self._template(delta.index)
        return events

    def _template(self, index: int) -> tuple[bytes, bytes]:
        sample = Delta(index=index, text=_SAMPLE, token_ids=[])
        before, _, after = self._event(self._format.chunk(sample)).partition(_SAMPLE_JSON)
        return before, after

    def _event(self, chunk: dict[str, Any]) -> bytes:
        if self._continuous_usage:
            chunk["usage"] = usage_body(self.usage)
        elif self._include_usage:
            chunk["usage"] = None
        return b"data: " + orjson.dumps(chunk) + b"\n\n"


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run to the end, whatever it is; nothing is left at the workers afterwards."""
        progress = Progress()
        error: BaseException | None = None
        gathering = Gathering(self._request)
        events = self._event_stream(scope, send) if self._is_stream else None
        try:
            timeout_s = self._service.config.client_write_timeout_s
            async with cancel_on_disconnect(receive, timeout_s) as writes:
                if events is None:
                    await self._service.run(self._request, progress, self._account, gathering)
                    body = await self._body(gathering)
                else:
                    events.writes = writes
                    await self._service.run(self._request, progress, self._account, events)
                    await events.ready()
            # NOTE: the last bytes go out when nothing can be cancelled any more: the server
            # reports a finished response as a disconnect.
            if events is None:
                await send_json(send, 200, body, [_request_id(self._request)])
            else:
                await self._write_last(send, events.ending())
        except ProxyError as failure:
            error = failure
            await self._send_error(send, failure, events)
        except ClientDisconnected as failure:
            error = failure
        except asyncio.CancelledError:
            # A client that left is a ClientDisconnected: this is the end of the service.
            error = Unavailable("the service is shutting down", retry_after_s=1.0)
            await self._send_error(send, error, events)
        except Exception as failure:  # outermost: the client must get an answer
            error = failure
            logger.exception("request %s failed", self._request.request_id)
            await self._send_error(send, InternalError("internal error"), events)
        finally:
            self._service.count(self._api, progress, error)

    def _event_stream(self, scope: Scope, send: Send) -> EventStream:
        return EventStream(
            self._request,
            self._format,
            send,
            scope.get("extensions", {}).get(CHUNK_WRITER),
            include_usage=self._include_usage,
            continuous_usage=self._continuous_usage,
        )

    async def _body(self, gathering: Gathering) -> dict[str, Any]:
        selected = select_choices(gathering.choices, self._request)
        num_logprobs = sum(len(choice.logprobs or ()) for choice in selected)
        if num_logprobs <= _MAX_INLINE_LOGPROBS:
            return self._format.response(selected, gathering.usage)
        return await asyncio.to_thread(self._format.response, selected, gathering.usage)

    async def _write_last(self, send: Send, data: bytes) -> None:
        """End a stream that has begun.

        Raises: ClientDisconnected: the client took nothing for client_write_timeout_s.
        """
        try:
            async with asyncio.timeout(self._service.config.client_write_timeout_s):
                await send({"type": "http.response.body", "body": data})
        except TimeoutError:
            raise ClientDisconnected("the client reads too slowly") from None

    async def _send_error(self, send: Send, error: ProxyError, events: EventStream | None) -> None:
        if events is None or not events.has_started:
            await send_error(send, error)
            return
        event = b"data: " + orjson.dumps(error.body()) + b"\n\n"
        try:
            await self._write_last(send, events.take_pending() + event)
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
