"""The Worker service of both roles: one stream per proxy, in and out of the engine loop.

gRPC loop thread                                 engine loop thread
Session stream  -- SessionMessage, SessionClosed -->  Inbox
stream's queue  <-- Outbox.send / broadcast --------  after each step
"""

import asyncio
import hmac
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc

from engine.worker.inbox import Inbox, SessionClosed, SessionMessage, StatsQuery
from protos import worker_pb2, worker_pb2_grpc

TOKEN_METADATA_KEY = "x-pdserve-token"
_MAX_QUEUED_MESSAGES = 4096
_STATS_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class Outbox:
    """Messages on their way to the proxies; the engine loop's side of the sessions."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[int, asyncio.Queue[worker_pb2.WorkerMessage | None]] = {}

    def send(self, messages: Sequence[tuple[int, worker_pb2.WorkerMessage]]) -> None:
        """Queue (session, message) pairs in order; any thread. A closed session's are dropped."""
        if messages:
            self._call(lambda: self._put_all(messages))

    def broadcast(self, message: worker_pb2.WorkerMessage) -> None:
        """Queue a message for every session; any thread."""
        self._call(lambda: self._put_all([(session_id, message) for session_id in self._queues]))

    def _call(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            _log.debug("gRPC loop is closed; messages dropped")

    def open(self, session_id: int) -> "asyncio.Queue[worker_pb2.WorkerMessage | None]":
        """Add a session's queue; gRPC loop only."""
        queue: asyncio.Queue[worker_pb2.WorkerMessage | None] = asyncio.Queue()
        self._queues[session_id] = queue
        return queue

    def close(self, session_id: int) -> None:
        """Forget a session's queue; gRPC loop only."""
        self._queues.pop(session_id, None)

    def _put_all(self, messages: Sequence[tuple[int, worker_pb2.WorkerMessage]]) -> None:
        for session_id, message in messages:
            self._put(session_id, message)

    def _put(self, session_id: int, message: worker_pb2.WorkerMessage) -> None:
        queue = self._queues.get(session_id)
        if queue is None:
            return
        if queue.qsize() >= _MAX_QUEUED_MESSAGES:
            # NOTE: a proxy that stops reading must not fill this memory: cancel its requests.
            _log.warning(
                "session %d does not read its %d messages: closed", session_id, queue.qsize()
            )
            self._queues.pop(session_id)
            queue.put_nowait(None)
            return
        queue.put_nowait(message)


class SessionService(worker_pb2_grpc.WorkerServicer):
    """Moves messages between streams and the engine loop; knows nothing of their meaning."""

    def __init__(
        self, *, inbox: Inbox[Any], outbox: Outbox, hello: worker_pb2.WorkerHello, token: str
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._hello = hello
        self._token = token
        self._session_ids = itertools.count(1)

    async def Session(
        self,
        request_iterator: AsyncIterator[worker_pb2.ProxyMessage],
        context: "grpc.aio.ServicerContext[worker_pb2.ProxyMessage, worker_pb2.WorkerMessage]",
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """Serve one proxy until either side ends the stream."""
        await authenticate(context, self._token)
        session_id = next(self._session_ids)
        queue = self._outbox.open(session_id)
        reader = asyncio.create_task(self._read(session_id, request_iterator, queue))
        try:
            yield worker_pb2.WorkerMessage(hello=self._hello)
            while (message := await queue.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self._outbox.close(session_id)
            self._inbox.put(SessionClosed(session_id))

    async def _read(
        self,
        session_id: int,
        messages: AsyncIterator[worker_pb2.ProxyMessage],
        queue: "asyncio.Queue[worker_pb2.WorkerMessage | None]",
    ) -> None:
        try:
            async for message in messages:
                self._inbox.put(SessionMessage(session_id, message))
        finally:
            queue.put_nowait(None)

    async def GetStats(
        self,
        request: worker_pb2.GetStatsRequest,
        context: "grpc.aio.ServicerContext[worker_pb2.GetStatsRequest, worker_pb2.WorkerStats]",
    ) -> worker_pb2.WorkerStats:
        """The loop's own numbers, taken between two steps."""
        await authenticate(context, self._token)
        query = StatsQuery()
        self._inbox.put(query)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(query.reply), _STATS_TIMEOUT_S)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"engine loop busy for {_STATS_TIMEOUT_S} s"
            )
            raise


async def authenticate(context: "grpc.aio.ServicerContext[Any, Any]", token: str) -> None:
    """End the call as UNAUTHENTICATED unless it carries `token`; an empty one accepts all."""
    metadata = dict(context.invocation_metadata() or ())
    given = str(metadata.get(TOKEN_METADATA_KEY, ""))
    if token and not hmac.compare_digest(given.encode(), token.encode()):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "cluster token missing or wrong")
