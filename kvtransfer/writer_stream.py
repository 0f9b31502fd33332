"""The reader's end of one open stream of a writer rank."""

import asyncio
import contextlib
from collections.abc import Callable

from kvtransfer.reshard import Resharding, find_writers
from kvtransfer.transports.base import Transport
from protos import worker_pb2


class WriterStream:
    """Made on the loop of the stream; `send` and `call_later` may be called from any thread."""

    def __init__(self, engine_id: str, resharding: Resharding, transport: Transport):
        self.engine_id = engine_id
        self.resharding = resharding
        self.tp_rank = resharding.source.tp_rank
        self.needed_ranks = find_writers(resharding.source, resharding.target)
        self.transport = transport
        self.is_broken = False
        self._loop = asyncio.get_running_loop()
        self._outgoing: asyncio.Queue[worker_pb2.ReaderMessage | None] = asyncio.Queue()

    def send(self, message: worker_pb2.ReaderMessage | None) -> None:
        """Queue a message from any thread; None ends the stream."""
        # A closed loop has no stream left to send on.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._outgoing.put_nowait, message)

    async def next_message(self) -> worker_pb2.ReaderMessage | None:
        """Wait for what send queued."""
        return await self._outgoing.get()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Run callback on the loop of the stream."""
        self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, callback)
