"""One worker's KV events, in order, into the prefix index.

start --ResyncKV--> waiting --snapshot n--> following n+1, n+2 ... --a gap--> ResyncKV, waiting
"""

from collections.abc import Callable

from protos import worker_pb2
from protos.block_hash import BLOCK_HASH_BYTES
from proxy.prefix_index import Holder, PrefixIndex


class KVSubscription:
    """Belongs to one session; what it added is dropped with it."""

    def __init__(
        self,
        index: PrefixIndex,
        identity: Holder,
        send: Callable[[worker_pb2.ProxyMessage], None],
    ) -> None:
        self._index = index
        self._identity = identity
        self._send = send
        self._next: int | None = None
        """Number of the event that follows; None: a snapshot was asked for."""
        self.num_resyncs = 0

    def start(self) -> None:
        """Ask for a snapshot."""
        self._resync()

    def apply(self, events: worker_pb2.KVEvents) -> None:
        """Take in a message; one that was seen is ignored, one that comes too early starts over."""
        if events.is_snapshot:
            self._index.drop(self._identity)
            self._index.add(_hashes(events.stored), self._identity)
            self._next = events.sequence + 1
        elif self._next is None or events.sequence < self._next:
            return
        elif events.sequence > self._next:
            self._resync()
        else:
            self._next += 1
            self._index.remove(_hashes(events.removed), self._identity)
            self._index.add(_hashes(events.stored), self._identity)

    def close(self) -> None:
        """The session is over: nobody tells what the worker holds."""
        self._next = None
        # One that was never greeted added nothing; such sessions may end many times a second.
        if self.num_resyncs:
            self._index.drop(self._identity)

    def _resync(self) -> None:
        self._next = None
        self.num_resyncs += 1
        self._send(worker_pb2.ProxyMessage(resync_kv=worker_pb2.ResyncKV()))


def _hashes(joined: bytes) -> list[bytes]:
    size = BLOCK_HASH_BYTES
    return [joined[start : start + size] for start in range(0, len(joined), size)]
