"""What the engine loops of both roles do alike; a role adds how it steps and what it takes.

    events --> sessions, tiers, stats, stop: here; the others: the role
    overdue requests end --> the role's step --> stats, when they are due --> answers leave

One thread owns everything. Other threads put events into the inbox; answers leave through the
outbox. While no pool has anything to compute, no rank does anything.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from engine.prefix_tiers import TierEvent
from engine.request import Request, RequestKey
from engine.worker.assembly import Engine
from engine.worker.balance import Load, least_loaded
from engine.worker.convert import key_from_proto
from engine.worker.inbox import Inbox, SessionClosed, SessionMessage, StatsQuery, Stop
from engine.worker.intake import Intake, Tracked
from protos import worker_pb2

_TICK_S = 0.25

_log = logging.getLogger(__name__)

CommonEvent = SessionMessage | SessionClosed | StatsQuery | Stop | TierEvent
"""What any engine loop takes."""

RoleEventT = TypeVar("RoleEventT")
RoleEventT_contra = TypeVar("RoleEventT_contra", contravariant=True)


class RequestPool(Protocol):
    """The requests of one data-parallel rank."""

    @property
    def entries(self) -> Mapping[RequestKey, Tracked]:
        """Everything that is not released."""
        ...

    def load_with(self, request: Request) -> Load:
        """How busy it would be with one more request."""
        ...

    def end(self, key: RequestKey, reason: str) -> None:
        """Stop whatever is done for a key that it has."""
        ...

    def take_fetched(self, event: TierEvent) -> None:
        """The tiers have done something for this pool."""
        ...

    def transfers(self) -> list[worker_pb2.TransferPeerStats]:
        """Of the leader's own rank."""
        ...


PoolT = TypeVar("PoolT", bound=RequestPool)


class Pools(Generic[PoolT]):
    """Those of an engine, by data-parallel rank."""

    def __init__(self, pools: Sequence[PoolT]) -> None:
        self._pools = pools

    def __iter__(self) -> Iterator[PoolT]:
        return iter(self._pools)

    def __getitem__(self, dp_rank: int) -> PoolT:
        return self._pools[dp_rank]

    def of(self, key: RequestKey) -> PoolT | None:
        """The one that has the request."""
        return next((pool for pool in self._pools if key in pool.entries), None)

    def computing(self, key: RequestKey) -> PoolT:
        """The one of a request that a step has just computed."""
        pool = self.of(key)
        assert pool is not None, f"{key} was computed, but is not here"
        return pool

    def for_new(self, request: Request) -> PoolT:
        """The one that is least loaded with the request."""
        if len(self._pools) == 1:
            return self._pools[0]
        return self._pools[least_loaded([pool.load_with(request) for pool in self._pools])]

    def end(self, key: RequestKey, reason: str) -> None:
        """Stop whatever is done for a key, if it is here."""
        if (pool := self.of(key)) is not None:
            pool.end(key, reason)


class Role(Protocol[RoleEventT_contra]):
    """What one of the two roles does of its own."""

    def step(self) -> bool:
        """Run one engine step and report it; whether there was anything to compute."""
        ...

    def take_event(self, event: RoleEventT_contra) -> None:
        """An event that the loop does not know."""
        ...

    def take_message(self, session_id: int, message: worker_pb2.ProxyMessage) -> bool:
        """A message that the loop does not know; False: the role does not take it either."""
        ...

    def num_pending(self) -> list[int]:
        """By data-parallel rank, the requests that wait outside its scheduler."""
        ...


class EngineLoop(Generic[RoleEventT, PoolT]):
    """See the module's docstring; implements `process.Loop`."""

    def __init__(
        self,
        *,
        engine: Engine,
        intake: Intake,
        inbox: Inbox[CommonEvent | RoleEventT],
        pools: Pools[PoolT],
        role: Role[RoleEventT],
    ) -> None:
        self._counters = engine.counters
        self._intake = intake
        self._replies = intake.replies
        self._inbox = inbox
        self._pools = pools
        self._role = role
        self._stopping = False
        self._progressed = False
        for pool in engine.pools:
            pool.tiers.start(pool.blocks, inbox.put)

    @property
    def summary(self) -> str:
        """See `process.Loop`."""
        forward = self._counters.forward
        if not forward.num_graphs:
            return ""
        return f"{forward.num_graphs} graphs in {forward.capture_s:.1f} s"

    def run(self) -> None:
        """Work until a Stop event."""
        while not self._stopping:
            self.step()

    def request_stop(self) -> None:
        """Make `run` return after the current step; any thread."""
        self._inbox.put(Stop())

    def step(self) -> None:
        """Take in what has arrived, run one engine step, send what it produced."""
        for event in self._inbox.drain(0.0 if self._progressed else self._wait_s()):
            self._dispatch(event)
        for pool in self._pools:
            for key, reason in self._intake.overdue(pool.entries):
                pool.end(key, reason)
        self._progressed = self._role.step()
        if self._replies.stats_due():
            self._replies.stats(self._stats())
            self._intake.publish_kv()
        self._replies.flush()

    def _wait_s(self) -> float:
        """How long nothing but an event can be news: leases and deadlines pass by themselves."""
        return _TICK_S if any(pool.entries for pool in self._pools) else self._replies.idle_s()

    def _dispatch(self, event: CommonEvent | RoleEventT) -> None:
        match event:
            case SessionMessage(session_id, message):
                self._dispatch_message(session_id, message)
            case TierEvent():
                self._pools[event.dp_rank].take_fetched(event)
            case SessionClosed(session_id):
                for key in self._intake.of_session(session_id):
                    self._pools.end(key, "the proxy's session closed")
            case StatsQuery(reply):
                reply.set_result(self._stats())
            case Stop():
                self._stopping = True
            case _:
                self._role.take_event(event)

    def _dispatch_message(self, session_id: int, message: worker_pb2.ProxyMessage) -> None:
        match message.WhichOneof("message"):
            case "cancel":
                key = key_from_proto(message.cancel.key)
                if self._pools.of(key) is None:
                    self._replies.unknown(session_id, key)
                else:
                    self._pools.end(key, message.cancel.reason or "cancelled")
            case "renew":
                self._intake.renew(message.renew)
            case "set_adapter":
                entries = [entry for pool in self._pools for entry in pool.entries.values()]
                self._intake.set_adapter(session_id, message.set_adapter, entries)
            case "resync_kv":
                self._intake.resync_kv(session_id)
            case kind:
                if not self._role.take_message(session_id, message):
                    _log.warning("session %d sent %s, which is not for this role", session_id, kind)
                    self._counters.num_stale_messages += 1

    def _stats(self) -> worker_pb2.WorkerStats:
        transfers = [peer for pool in self._pools for peer in pool.transfers()]
        return self._intake.stats(transfers, self._role.num_pending())
