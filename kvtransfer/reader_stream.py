"""The writer's end of one stream to a reader rank, and the event loop that streams run on."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeAlias

import grpc.aio

from kvtransfer.link import is_accepted, token_metadata
from protos import worker_pb2, worker_pb2_grpc

# Idle, each message would be followed by a ping that measures the connection.
_OPTIONS = (("grpc.http2.bdp_probe", 0),)

_Call: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.WriterMessage, worker_pb2.ReaderMessage]"


class StreamLoop:
    """The loop of a server in this process, or one on a thread of its own.

    NOTE: streams of gRPC's blocking API look up fifteen times a second, for ever.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """loop: runs on another thread, and outlives this object; None starts one."""
        self._thread: threading.Thread | None = None
        if loop is None:
            runner = asyncio.Runner()
            loop = runner.get_loop()
            self._stopping = asyncio.Event()
            self._thread = threading.Thread(
                target=self._run, args=(runner,), name="kv-streams", daemon=True
            )
            self._thread.start()
        self._loop = loop

    def _run(self, runner: asyncio.Runner) -> None:
        with runner:
            runner.run(self._wait_until_stopped())

    async def _wait_until_stopped(self) -> None:
        await self._stopping.wait()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> "Future[None]":
        """Run it on the loop; any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        """Call it on the loop, unless that is closed; any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def close(self, timeout_s: float) -> None:
        """End the thread, if it is our own."""
        if self._thread is not None:
            self.call_soon(self._stopping.set)
            self._thread.join(timeout_s)


class ReaderStream:
    """`open` once, then `send` and `close`; from any thread but the loop's."""

    def __init__(
        self,
        loop: StreamLoop,
        address: str,
        token: str,
        on_message: Callable[[worker_pb2.ReaderMessage], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Both callbacks run on the loop and must be cheap; on_end is told why, and comes last.

        It does not come if the stream is closed before it began.
        """
        self._loop = loop
        self._address = address
        self._token = token
        self._on_message = on_message
        self._on_end = on_end
        self._outgoing: asyncio.Queue[worker_pb2.WriterMessage | None] = asyncio.Queue()
        self._over: Future[None] | None = None

    def open(self) -> None:
        """Begin; what was sent before goes first."""
        self._over = self._loop.start(self._run())

    def send(self, message: worker_pb2.WriterMessage | None) -> None:
        """Queue a message; None says that there are no more. Lost if the stream is over."""
        self._loop.call_soon(self._outgoing.put_nowait, message)

    def close(self, grace_s: float = 0.0) -> None:
        """Let what was sent leave, for grace_s at most, then end the stream."""
        assert self._over is not None, "open() first"
        if grace_s:
            self.send(None)
            wait((self._over,), grace_s)
        self._over.cancel()

    async def _run(self) -> None:
        reason = "the reader closed the link"
        try:
            async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
                call: _Call = worker_pb2_grpc.KVLinkStub(channel).Link(
                    metadata=token_metadata(self._token)
                )
                writing = asyncio.create_task(self._write(call))
                try:
                    async for message in call:
                        self._on_message(message)
                finally:
                    writing.cancel()
        except grpc.aio.AioRpcError as error:
            reason = f"link broken: {error.code()} {error.details()}"
        except asyncio.CancelledError:
            reason = "the link was closed"
            raise
        finally:
            self._on_end(reason)

    async def _write(self, call: _Call) -> None:
        # NOTE: a call that is over raises; its reason is what reading it raises. But a write to one
        # that is about to be refused would make the reason an internal error.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            if not is_accepted(await call.initial_metadata()):
                return
            while (message := await self._outgoing.get()) is not None:
                await call.write(message)
            await call.done_writing()
