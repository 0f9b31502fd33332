"""HTTP/1.1 as uvicorn parses it, with bounds on the size of a head and the time of a request."""

import asyncio
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers of one request, and a piece of them that is not complete yet."""


def _refusal(status: bytes, message: str, code: str) -> bytes:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = orjson.dumps({"error": error})
    return (
        b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body)
    )


_TOO_LARGE = _refusal(
    b"431 Request Header Fields Too Large",
    f"request line and headers have more than {MAX_HEAD_BYTES} bytes",
    "headers_too_large",
)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes the connection after 431 for a large head, and after 408 for a slow request.

    read_timeout_s counts from the connection, and from each request's first byte, to its last one.

    NOTE: the parser has no bound of its own, and joins the pieces of a long header in quadratic
    time: a single client could stop the event loop for all others.
    """

    _deadline: asyncio.TimerHandle | None = None
    """Of the request that has not arrived completely."""
    _num_head_bytes = 0
    _num_silent_bytes = 0
    """Received since the parser last completed something: part of a header, at worst."""
    _is_refused = False

    def __init__(self, *arguments: Any, read_timeout_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._read_timeout_s = read_timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
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
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    def on_message_begin(self) -> None:
        """Start counting."""
        self._num_head_bytes = self._num_silent_bytes = 0
        self._await_request()
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
        self._stop_waiting()
        super().on_message_complete()

    def _count(self, num_bytes: int) -> None:
        self._num_silent_bytes = 0
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._is_refused = True
            # The parser turns it into an HttpParserError, which ends in send_400_response.
            raise ValueError("the head is too large")

    def _await_request(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(self._read_timeout_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        cycle = self.cycle
        is_busy = cycle is not None and not cycle.response_complete
        if is_busy and not cycle.more_body:
            # This client has sent the beginning of a request while it gets an earlier one's answer.
            self._await_request()
            return
        if not self.transport.is_closing():
            if not (is_busy and cycle.response_started):
                message = f"the request did not arrive within {self._read_timeout_s:g} s"
                refusal = _refusal(b"408 Request Timeout", message, "request_read_timeout")
                self.transport.write(refusal)
            self.transport.close()
