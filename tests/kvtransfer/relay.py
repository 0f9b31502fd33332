"""A relay between writer and reader that loses, repeats, delays or reorders one message."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import grpc.aio

from kvtransfer.link import ACCEPTED, TOKEN_METADATA
from protos import worker_pb2, worker_pb2_grpc

DELAY_S = 0.3
FORWARD, BACKWARD = "writer", "reader"


class Relay(worker_pb2_grpc.KVLinkServicer):
    """Serves KVLink in front of a reader, in a thread of its own."""

    def __init__(self, reader_address: str):
        self.fault: tuple[str, str, str] | None = None
        """(direction, kind of message, what to do with the next one of it)."""
        self.num_faults = 0
        self._reader_address = reader_address
        self._started: Future[str] = Future()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self.address = self._started.result(10)

    async def _serve(self) -> None:
        server = grpc.aio.server()
        worker_pb2_grpc.add_KVLinkServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._started.set_result(f"127.0.0.1:{port}")
        await asyncio.to_thread(self._stop.wait)
        await server.stop(0.2)

    async def Link(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        await context.send_initial_metadata(ACCEPTED)
        metadata = [item for item in context.invocation_metadata() if item[0] == TOKEN_METADATA]
        async with grpc.aio.insecure_channel(self._reader_address) as channel:
            call = worker_pb2_grpc.KVLinkStub(channel).Link(
                self._pass_on(FORWARD, request_iterator), metadata=metadata
            )
            try:
                async for message in self._pass_on(BACKWARD, call):
                    yield message
            except grpc.aio.AioRpcError:
                return
            finally:
                call.cancel()

    async def _pass_on(self, direction: str, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def read() -> None:
            try:
                async for message in messages:
                    await self._apply(direction, message, queue)
            finally:
                queue.put_nowait(None)

        reading = asyncio.create_task(read())
        held: list[Any] = []
        try:
            while True:
                try:
                    message = await asyncio.wait_for(queue.get(), DELAY_S if held else None)
                except TimeoutError:
                    message = None if not held else held.pop()
                    yield message
                    continue
                if message is None:
                    break
                if isinstance(message, tuple):
                    held.append(message[0])
                    continue
                yield message
                while held:
                    yield held.pop()
        finally:
            reading.cancel()

    async def _apply(self, direction: str, message: Any, queue: "asyncio.Queue[Any]") -> None:
        action = "pass"
        if self.fault is not None and self.fault[:2] == (
            direction,
            message.WhichOneof("message"),
        ):
            action, self.fault = self.fault[2], None
            self.num_faults += 1
        if action == "drop":
            return
        if action == "delay":
            await asyncio.sleep(DELAY_S)
        # A tuple is kept back until the next message has gone by, or for a while.
        queue.put_nowait((message,) if action == "reorder" else message)
        if action == "repeat":
            queue.put_nowait(message)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)


def target_through(relay: Relay, target: worker_pb2.KVTarget) -> worker_pb2.KVTarget:
    """The same blocks, reached by way of the relay."""
    target.link_address = relay.address
    return target
