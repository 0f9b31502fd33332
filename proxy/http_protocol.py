"""HTTP/1.1 as uvicorn parses it, with bounds on size and time of request line and headers."""

import asyncio
import re
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers of one request, and a piece of them that is not complete yet."""

_BODY = orjson.dumps(
    {
        "error": {
            "message": f"request line and headers have more than {MAX_HEAD_BYTES} bytes",
            "type": "invalid_request_error",
            "param": None,
            "code": "headers_too_large",
        }
    }
)
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_BODY), _BODY)
)


CHUNK_WRITER = "pdserve.chunk_writer"
"""Extension of the ASGI scope: the ChunkWriter of the request's response."""


@dataclass(slots=True)
class WriteGate:
    """Whether a connection takes more: not while its client reads slower than we write."""

    is_open: bool = True


class ChunkWriter:
    """Writes pieces of a body that has begun, without a coroutine for each of them."""

    __slots__ = ("_cycle", "_gate", "_is_unbounded", "_transport")

    def __init__(self, cycle: RequestResponseCycle, gate: WriteGate) -> None:
        self._cycle = cycle
        self._gate = gate
        self._transport = cycle.transport
        self._is_unbounded = False

    @property
    def is_usable(self) -> bool:
        """Whether the response has begun, has not ended, and has no other form."""
        cycle = self._cycle
        return bool(
            cycle.response_started and cycle.chunked_encoding and not cycle.response_complete
        )

    def expect(self, message: Message) -> None:
        """Let a body of unknown length pass without chunks; called before each of its messages."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            if all(name != b"content-length" for name, _ in message.get("headers", ())):
                cycle.chunked_encoding = cycle.keep_alive = False
                self._is_unbounded = True
        elif self._is_unbounded:
            cycle.expected_content_length = len(message.get("body", b""))

    def write(self, data: bytes) -> bool:
        """Write a piece while usable; False, and nothing is written: it has to go by the ASGI way.

        So it is while the client reads slower than we write, and when it is gone.
        """
        if not self._gate.is_open:
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class WithoutChunks:
    """Lets an application answer clients of HTTP/1.0, such as older nginx, as they expect.

    They know no chunks: the body of a stream ends where the connection does.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        writer = scope.get("extensions", {}).get(CHUNK_WRITER)
        if scope.get("http_version") != "1.0" or writer is None:
            await self._app(scope, receive, send)
            return

        async def send_plain(message: Message) -> None:
            writer.expect(message)
            await send(message)

        await self._app(scope, receive, send_plain)


_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)


def _without_upgrade(data: bytes) -> bytes:
    """Hide offers to change the protocol, which a server may ignore.

    NOTE: Java's client makes one with each request (h2c), and the parser would take the body for
    the other protocol.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nupgrad_:", head) + end + rest


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 where a head is larger than MAX_HEAD_BYTES, and closes the connection.

    NOTE: the parser has no bound of its own, and joins the pieces of a long header in quadratic
    time: a single client could stop the event loop for all others.
    """

    head_timeout_s = 60.0
    """A connection that is open, or a request that has begun, without a whole head is closed."""

    _head_timer: asyncio.TimerHandle | None = None
    _is_in_head = True
    _num_head_bytes = 0
    _num_silent_bytes = 0
    """Received since the parser last completed something: part of a header, at worst."""
    _is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start waiting for a request."""
        self._gate = WriteGate()
        super().connection_made(transport)  # type: ignore[arg-type]
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._gate.is_open = False
        self._stop_waiting()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Note that the client reads too slowly."""
        self._gate.is_open = False
        super().pause_writing()

    def resume_writing(self) -> None:
        """Note that the client has caught up."""
        self._gate.is_open = True
        super().resume_writing()

    def on_headers_complete(self) -> None:
        """The head is there; the body has a deadline elsewhere."""
        self._is_in_head = False
        self._stop_waiting()
        super().on_headers_complete()
        if self.cycle is not None:
            scope = cast(MutableMapping[str, Any], self.cycle.scope)
            scope["extensions"] = {CHUNK_WRITER: ChunkWriter(self.cycle, self._gate)}

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        if self._is_in_head and b"pgrade" in data:
            data = _without_upgrade(data)
        self._num_silent_bytes += len(data)
        super().data_received(data)
        if self._num_silent_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._is_refused = True
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed."""
        if not self._is_refused:
            super().send_400_response(msg)
            return
        self.transport.write(_REFUSAL)
        self.transport.close()

    def on_message_begin(self) -> None:
        """Start counting."""
        self._num_head_bytes = self._num_silent_bytes = 0
        self._expect_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header or trailer."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body, which has a bound elsewhere."""
        self._num_silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Hand over the end of the body."""
        self._num_silent_bytes = 0
        self._is_in_head = True
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_silent_bytes = 0
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._is_refused = True
            # The parser turns it into an HttpParserError, which ends in send_400_response.
            raise ValueError("the head is too large")
