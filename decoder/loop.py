"""The decoder's engine loop: it takes requests in, steps, and sends what came out.

    Reserve --the least loaded data-parallel rank--> DecodePool of that rank
    step: events --> schedule every pool --> one forward pass of all ranks --> tokens
          with async_scheduling, tokens are those of the step before; see engine.async_scheduling

One thread owns everything. Other threads put events into the inbox; answers leave through the
outbox. While no pool has anything to compute, no rank does anything.
"""

import logging
from collections.abc import Sequence

from decoder.pool import DecodePool
from engine.async_scheduling import AsyncScheduling
from engine.prefix_tiers import TierEvent
from engine.request import Request, RequestKey
from engine.worker.assembly import Engine
from engine.worker.balance import least_loaded
from engine.worker.convert import key_from_proto
from engine.worker.inbox import Inbox, SessionClosed, SessionMessage, StatsQuery, Stop
from engine.worker.intake import Intake
from engine.worker.step import Emitted
from kvtransfer.connector import KVArrived, KVFailed, KVQuiet, ReceiveEvent
from protos import worker_pb2

DecodeEvent = SessionMessage | SessionClosed | StatsQuery | Stop | ReceiveEvent | TierEvent

_TICK_S = 0.25

_log = logging.getLogger(__name__)


class DecodeLoop:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        engine: Engine,
        intake: Intake,
        inbox: Inbox[DecodeEvent],
        pools: Sequence[DecodePool],
    ) -> None:
        """pools: by data-parallel rank."""
        self._pools = pools
        self._steps = engine.steps
        self._async_scheduling: AsyncScheduling[Emitted] | None = None
        if self._steps.ahead is not None:
            own = pools[0]
            self._async_scheduling = AsyncScheduling(
                self._steps.ahead, self._steps, own.schedule, own.schedule_ahead
            )
        self._counters = engine.counters
        self._intake = intake
        self._replies = intake.replies
        self._inbox = inbox
        for pool in engine.pools:
            pool.tiers.start(pool.blocks, inbox.put)
        self._stopping = False
        self._progressed = False

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
            for key, _ in self._intake.overdue(pool.entries):
                pool.end(key)
        emitted = self._run_step()
        self._progressed = emitted is not None
        if emitted is None:
            self._steps.idle()
        else:
            self._replies.tokens(emitted)
            for request, _ in emitted:
                if request.finish_reason is not None:
                    self._release(request.key)
        if self._replies.stats_due():
            self._replies.stats(self._stats())
            self._intake.publish_kv()
        self._replies.flush()

    def _run_step(self) -> list[Emitted] | None:
        """What a step gave, one that was launched before perhaps; None: there is none to run."""
        if self._async_scheduling is not None:
            return self._async_scheduling.step()
        scheduled = [pool.schedule() for pool in self._pools]
        return self._steps.run(scheduled) if any(scheduled) else None

    def _wait_s(self) -> float:
        """How long nothing but an event can be news: leases and deadlines pass by themselves."""
        return _TICK_S if any(pool.entries for pool in self._pools) else self._replies.idle_s()

    def _dispatch(self, event: DecodeEvent) -> None:
        match event:
            case SessionMessage(session_id, message):
                self._dispatch_message(session_id, message)
            case KVArrived(key) | KVFailed(key) | KVQuiet(key):
                if (pool := self._find(key)) is not None:
                    pool.on_receive_event(event)
            case TierEvent():
                self._pools[event.dp_rank].take_fetched(event)
            case SessionClosed(session_id):
                for key in self._intake.of_session(session_id):
                    self._end(key)
            case StatsQuery(reply):
                reply.set_result(self._stats())
            case Stop():
                self._stopping = True

    def _dispatch_message(self, session_id: int, message: worker_pb2.ProxyMessage) -> None:
        match message.WhichOneof("message"):
            case "reserve":
                self._reserve(session_id, message.reserve)
            case "activate":
                key = key_from_proto(message.activate.key)
                if (pool := self._find(key)) is not None:
                    pool.activate(key, message.activate)
            case "prefill_locally":
                key = key_from_proto(message.prefill_locally.key)
                if (pool := self._find(key)) is not None:
                    pool.prefill_locally(key)
            case "cancel":
                self._cancel(session_id, key_from_proto(message.cancel.key))
            case "renew":
                self._intake.renew(message.renew)
            case "set_adapter":
                entries = [entry for pool in self._pools for entry in pool.entries.values()]
                self._intake.set_adapter(session_id, message.set_adapter, entries)
            case "resync_kv":
                self._intake.resync_kv(session_id)
            case kind:
                _log.warning("session %d sent %s, which a decoder does not take", session_id, kind)
                self._counters.num_stale_messages += 1

    def _reserve(self, session_id: int, message: worker_pb2.Reserve) -> None:
        if self._pool_of(key_from_proto(message.key)) is not None:
            self._counters.num_stale_messages += 1
            return
        self._intake.admit(session_id, message.key, message.work, self._accept)

    def _accept(self, request: Request) -> None:
        if len(self._pools) == 1:
            self._pools[0].accept(request)
        else:
            self._pools[least_loaded([p.load_with(request) for p in self._pools])].accept(request)

    def _cancel(self, session_id: int, key: RequestKey) -> None:
        if self._pool_of(key) is None:
            self._replies.unknown(session_id, key)
        else:
            self._end(key)

    def _end(self, key: RequestKey) -> None:
        if (pool := self._pool_of(key)) is not None:
            pool.end(key)

    def _release(self, key: RequestKey) -> None:
        pool = self._pool_of(key)
        assert pool is not None, f"{key} was computed, but is not here"
        pool.release(key)

    def _pool_of(self, key: RequestKey) -> DecodePool | None:
        return next((pool for pool in self._pools if key in pool.entries), None)

    def _find(self, key: RequestKey) -> DecodePool | None:
        """The pool of a key that a message is about; one about a key that is over is counted."""
        pool = self._pool_of(key)
        self._counters.num_stale_messages += pool is None
        return pool

    def _stats(self) -> worker_pb2.WorkerStats:
        transfers = [peer for pool in self._pools for peer in pool.transfers()]
        return self._intake.stats(transfers, [pool.num_pending for pool in self._pools])
