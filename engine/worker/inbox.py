"""What reaches an engine loop from other threads, in order of arrival."""

import queue
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from protos import worker_pb2

EventT = TypeVar("EventT")


@dataclass(frozen=True, slots=True)
class SessionMessage:
    """A message of one proxy's stream."""

    session_id: int
    message: worker_pb2.ProxyMessage


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The stream ended: everything that came over it is cancelled."""

    session_id: int


@dataclass(frozen=True, slots=True)
class StatsQuery:
    """Somebody waits for the loop's own numbers."""

    reply: "Future[worker_pb2.WorkerStats]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop."""


class Inbox(Generic[EventT]):
    """A queue with one reader, the engine loop; any thread may put.

    Unbounded by itself; its sources are not: sessions end in refusals, transfers need leases.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[EventT] = queue.SimpleQueue()

    def put(self, event: EventT) -> None:
        """Append an event; never blocks."""
        self._queue.put(event)

    def drain(self, timeout_s: float) -> Iterator[EventT]:
        """Yield what has arrived; wait up to `timeout_s` for the first event if nothing has."""
        try:
            if timeout_s > 0:
                yield self._queue.get(timeout=timeout_s)
            while True:
                yield self._queue.get_nowait()
        except queue.Empty:
            return
