"""Request bodies over HTTP: size, content type and JSON, each with its own error."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import orjson
from starlette.requests import Request
from starlette.types import Message, Receive

from proxy.errors import BodyTooLarge, ClientDisconnected, DeadlineExceeded, InvalidRequest

# A refused body is still read up to here: a client that is busy sending would not see the answer.
_MAX_DRAINED_BYTES = 64 * 1024 * 1024


async def read_json(request: Request, max_bytes: int, timeout_s: float) -> object:
    """Read and decode the body, of which a piece must come every `timeout_s`.

    Raises: BodyTooLarge, InvalidRequest, DeadlineExceeded, ClientDisconnected.
    """
    content_type = request.headers.get("content-type", "application/json")
    media_type = content_type.partition(";")[0].strip().lower()
    body = await _read(request.receive, max_bytes, timeout_s)
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise InvalidRequest(
            f"content-type must be application/json, got {media_type[:100]!r}",
            code="unsupported_content_type",
        )
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None


async def _read(receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await _receive(receive, timeout_s)
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes <= max_bytes:
            chunks.append(chunk)
        elif num_bytes > _MAX_DRAINED_BYTES:
            break
        if not message.get("more_body", False):
            break
    if num_bytes > max_bytes:
        raise BodyTooLarge.beyond(max_bytes)
    return b"".join(chunks)


async def _receive(receive: Receive, timeout_s: float) -> Message:
    try:
        async with asyncio.timeout(timeout_s):
            return await receive()
    except TimeoutError:
        raise DeadlineExceeded(f"no more of the body came within {timeout_s:g} s") from None


async def drain(receive: Receive, timeout_s: float) -> None:
    """Read a body that nobody needs.

    Raises: ClientDisconnected, DeadlineExceeded.
    """
    num_bytes = 0
    while num_bytes <= _MAX_DRAINED_BYTES:
        message = await _receive(receive, timeout_s)
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


@dataclass(slots=True)
class WriteWatch:
    """When the write that is in progress began; None between writes."""

    began_s: float | None = None
    has_stalled: bool = False


@contextmanager
def cancel_stalled_writes(timeout_s: float) -> Iterator[WriteWatch]:
    """Cancel the current task when a write of its block lasts `timeout_s`.

    The block notes its writes in the WriteWatch. (A timer for each write would cost more than the
    write.)
    """
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    writes = WriteWatch()
    timer: asyncio.TimerHandle | None = None

    def check() -> None:
        nonlocal timer
        if writes.began_s is not None and loop.time() - writes.began_s >= timeout_s:
            writes.has_stalled = True
            task.cancel()
        else:
            timer = loop.call_later(timeout_s / 4, check)

    check()
    try:
        yield writes
    finally:
        if timer is not None:
            timer.cancel()


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive, timeout_s: float) -> AsyncIterator[WriteWatch]:
    """Cancel the block when the client closes its connection; the body must have been read.

    A client that reads nothing for `timeout_s` while the block writes counts as gone.

    Raises: ClientDisconnected: instead of the cancellation.
    """
    task = asyncio.current_task()
    assert task is not None
    is_closed = False

    async def watch() -> None:
        nonlocal is_closed
        while (await receive())["type"] != "http.disconnect":
            pass
        is_closed = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    with cancel_stalled_writes(timeout_s) as writes:
        try:
            yield writes
            if is_closed or writes.has_stalled:
                # The cancellation is on its way to the next await; take it here.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if (is_closed or writes.has_stalled) and task.uncancel() == 0:
                raise ClientDisconnected from None
            raise
        finally:
            watcher.cancel()
