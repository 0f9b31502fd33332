"""The reader's end of one open stream of a writer rank."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from kvtransfer.errors import TransportUnavailable
from kvtransfer.layout import KVLayout
from kvtransfer.reshard import Resharding, find_writers
from kvtransfer.transports.base import Transport
from kvtransfer.transports.loading import LoadedTransports
from protos import worker_pb2

logger = logging.getLogger(__name__)


class WriterStream:
    """Made on the loop of the stream; `send` and `call_later` may be called from any thread."""

    def __init__(self, engine_id: str, resharding: Resharding, transport: Transport, pid: int):
        """pid: of a writer of this host, else 0."""
        self.engine_id = engine_id
        self._pid = pid
        self.resharding = resharding
        self.rank = resharding.source.engine_rank
        self.needed_ranks = find_writers(resharding.source, resharding.target)
        self.transport = transport
        self.is_broken = False
        self._loop = asyncio.get_running_loop()
        self._outgoing: asyncio.Queue[worker_pb2.ReaderMessage | None] = asyncio.Queue()

    @classmethod
    def accept(
        cls, hello: worker_pb2.WriterHello, layout: KVLayout, transports: LoadedTransports
    ) -> "WriterStream":
        """Of a writer that may write into a cache of this layout.

        Raises: ValueError or TransportUnavailable: why it may not.
        """
        layouts = [KVLayout.from_proto(message) for message in hello.layouts]
        if len(layouts) != 1:
            raise ValueError(f"the writer announced {len(layouts)} layouts, must be its own one")
        resharding = Resharding.between(layouts[0], layout)
        if not resharding.num_heads:
            raise ValueError(
                f"the writer has nothing to write here: it has {resharding.source}, the reader has "
                f"{resharding.target}"
            )
        is_here = hello.host_id == transports.host_id
        pid = hello.pid if is_here else 0
        return cls(hello.engine_id, resharding, _choose(hello, transports), pid)

    def send(self, message: worker_pb2.ReaderMessage | None) -> None:
        """Queue a message from any thread; None ends the stream."""
        # A closed loop has no stream left to send on.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._outgoing.put_nowait, message)

    def is_stopped(self) -> bool:
        """Whether the writer is known to stand still (SIGSTOP, a debugger): what it was writing
        would go on when it wakes. Never known of a writer of another host.
        """
        if not self._pid:
            return False
        try:
            with open(f"/proc/{self._pid}/stat", encoding="utf-8", errors="replace") as file:
                # The name of the command, in parentheses, may hold anything.
                state = file.read().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state in "Tt"

    async def next_message(self) -> worker_pb2.ReaderMessage | None:
        """Wait for what send queued."""
        return await self._outgoing.get()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Run callback on the loop of the stream."""
        self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, callback)


def _choose(hello: worker_pb2.WriterHello, transports: LoadedTransports) -> Transport:
    """The writer's first transport that is loaded here and reaches this host."""
    is_here = hello.host_id == transports.host_id
    for name in hello.transports:
        if name in transports.names and (name != "memory" or is_here):
            logger.info(
                "KV from %s by %s (writer has %s, reader has %s, %s host)",
                hello.engine_id,
                name,
                list(hello.transports),
                transports.names,
                "same" if is_here else "another",
            )
            return transports.named(name)
    raise TransportUnavailable(
        f"no common transport: writer has {list(hello.transports)} on {hello.host_id}, "
        f"reader has {transports.names} on {transports.host_id}"
    )
