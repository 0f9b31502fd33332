"""What a way of moving bytes has to offer: registered memory, an endpoint that names it, and
one-sided writes to a peer's.

reader: register(memory) -> endpoint() ---(link handshake)---> writer: register(memory) ->
connect(endpoint) -> write ... close
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvtransfer.registration import KVMemory
from protos import worker_pb2


class Segment(NamedTuple):
    """One run of bytes to copy; addresses are virtual ones of the two processes."""

    source_address: int
    target_address: int
    num_bytes: int


class Connection(Protocol):
    """A way into one peer's registered memory. Used by one thread at a time."""

    num_bytes: int
    """Written so far, counted as each segment completes."""

    def write(
        self,
        segments: Sequence[Segment],
        deadline: Callable[[], float],
        meanwhile: Callable[[], None],
    ) -> None:
        """Copy all segments; block until the transport reports every one complete.

        deadline() is on time.monotonic(), and comes closer when the transfer is given up.
        meanwhile is called once, if bytes can be on their way without this thread then; it reads
        the sources.
        Raises: TransferError: a segment failed or the deadline passed. Some bytes may have been
        written, and some may be written later: see num_unsettled.
        """
        ...

    def num_unsettled(self) -> int:
        """Segments of failed writes that the transport may still touch memory for."""
        ...

    def close(self) -> None:
        """Release what connect took. Idempotent."""
        ...


class Transport(Protocol):
    """One way of moving bytes, loaded once a process."""

    name: str
    crosses_network: bool
    """Whether bytes leave the memory of this host on their way."""
    is_landing_guaranteed: bool
    """Whether a completed write is visible in the peer's memory; else the reader polls the checksum
    for a while.
    """

    def register(self, memory: KVMemory) -> None:
        """Make `memory` usable as source and as target. Raises: TransportUnavailable."""
        ...

    def endpoint(self) -> worker_pb2.TransferEndpoint:
        """What a peer needs to write into the registered memory."""
        ...

    def connect(self, endpoint: worker_pb2.TransferEndpoint, deadline_s: float) -> Connection:
        """Reach a peer's memory.

        deadline_s is on time.monotonic(). Raises: TransportUnavailable.
        """
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...
