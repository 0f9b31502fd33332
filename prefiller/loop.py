"""The prefiller's engine loop: it computes prompts, pushes their KV and reports the first token.

    Prefill --the least loaded data-parallel rank--> prefix fetched from the tiers, if there are any
      --> PrefillPool of that rank
    step: events --> schedule every pool --> one forward pass of all ranks --> first tokens
    with layers in stages: a step begins, and tokens of another one come, which has ended meanwhile

One thread owns everything here. Other threads put events into the inbox; answers leave through the
outbox.
"""

import logging
from collections.abc import Callable, Sequence

from engine.prefix_tiers import TierEvent
from engine.request import Request, RequestKey
from engine.scheduler_output import ScheduledRequest
from engine.worker.assembly import Engine
from engine.worker.balance import least_loaded
from engine.worker.convert import key_from_proto
from engine.worker.inbox import Inbox, SessionClosed, SessionMessage, StatsQuery, Stop
from engine.worker.intake import Intake
from engine.worker.pipeline import StepEnded
from engine.worker.step import Emitted
from kvtransfer.connector import TransferResult
from prefiller.pool import PrefillPool
from protos import worker_pb2

PrefillEvent = (
    SessionMessage | SessionClosed | StatsQuery | Stop | TransferResult | TierEvent | StepEnded
)

_TICK_S = 0.25

_log = logging.getLogger(__name__)


class PrefillLoop:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        engine: Engine,
        intake: Intake,
        inbox: Inbox[PrefillEvent],
        pools: Sequence[PrefillPool],
    ) -> None:
        """pools: by data-parallel rank."""
        self._pools = pools
        self._steps = engine.steps
        self._pipeline = engine.pipeline
        if self._pipeline is not None:
            self._pipeline.listen(inbox.put)
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
        """Take in what has arrived, compute one chunk, report first tokens."""
        for event in self._inbox.drain(0.0 if self._progressed else self._wait_s()):
            self._dispatch(event)
        for pool in self._pools:
            for key, reason in self._intake.overdue(pool.entries):
                pool.end(key, reason)
        self._replies.flush()
        if self._pipeline is not None:
            self._conclude(self._pipeline.ended())
        scheduled = self._scheduled()
        self._progressed = any(scheduled)
        if self._progressed:
            self._compute(scheduled)
        else:
            self._steps.idle()
        if self._replies.stats_due():
            self._replies.stats(self._stats())
            self._intake.publish_kv()
        self._replies.flush()

    def _scheduled(self) -> list[list[ScheduledRequest]]:
        """What the next step computes, by pool."""
        if self._pipeline is not None and not self._pipeline.has_room:
            return []
        return [pool.schedule() for pool in self._pools]

    def _compute(self, scheduled: Sequence[list[ScheduledRequest]]) -> None:
        # NOTE: the first pool is the leader's: its pushes are made here, the others' elsewhere.
        push_layer, *_ = [
            pool.pusher(entries) for pool, entries in zip(self._pools, scheduled, strict=True)
        ]
        if self._pipeline is not None:
            self._pipeline.launch(scheduled[0], push_layer)
        else:
            self._conclude(self._steps.run(scheduled, push_layer))

    def _conclude(self, emitted: list[Emitted]) -> None:
        """Report first tokens; no more KV of their requests is pushed."""
        self._replies.tokens(emitted)
        self._replies.flush()
        for request, _ in emitted:
            pool = self._pool_of(request.key)
            assert pool is not None, f"{request.key} was computed, but is not here"
            pool.finish_transfer(request)

    def _wait_s(self) -> float:
        """How long nothing but an event can be news: leases and deadlines pass by themselves."""
        return _TICK_S if any(pool.entries for pool in self._pools) else self._replies.idle_s()

    def _dispatch(self, event: PrefillEvent) -> None:
        match event:
            case SessionMessage(session_id, message):
                self._dispatch_message(session_id, message)
            case TransferResult(key):
                if (pool := self._pool_of(key)) is None:
                    self._counters.num_stale_messages += 1
                else:
                    pool.conclude(event)
            case StepEnded():
                pass  # it is looked after once a round
            case TierEvent():
                self._pools[event.dp_rank].take_fetched(event)
            case SessionClosed(session_id):
                for key in self._intake.of_session(session_id):
                    self._end(key, "the proxy's session closed")
            case StatsQuery(reply):
                reply.set_result(self._stats())
            case Stop():
                self._stopping = True

    def _dispatch_message(self, session_id: int, message: worker_pb2.ProxyMessage) -> None:
        match message.WhichOneof("message"):
            case "prefill":
                self._prefill(session_id, message.prefill)
            case "cancel":
                key = key_from_proto(message.cancel.key)
                if self._pool_of(key) is None:
                    self._replies.unknown(session_id, key)
                else:
                    self._end(key, message.cancel.reason or "cancelled")
            case "renew":
                self._intake.renew(message.renew)
            case "set_adapter":
                entries = [entry for pool in self._pools for entry in pool.entries.values()]
                self._intake.set_adapter(session_id, message.set_adapter, entries)
            case "resync_kv":
                self._intake.resync_kv(session_id)
            case kind:
                _log.warning("session %d sent %s, not for a prefiller", session_id, kind)
                self._counters.num_stale_messages += 1

    def _prefill(self, session_id: int, message: worker_pb2.Prefill) -> None:
        if self._pool_of(key_from_proto(message.key)) is not None:
            self._counters.num_stale_messages += 1
            return
        self._intake.admit(session_id, message.key, message.work, self._acceptor(message.target))

    def _acceptor(self, target: worker_pb2.KVTarget) -> Callable[[Request], None]:
        def accept(request: Request) -> None:
            pool = self._pools[0]
            if len(self._pools) > 1:
                pool = self._pools[least_loaded([p.load_with(request) for p in self._pools])]
            pool.accept(request, target)

        return accept

    def _end(self, key: RequestKey, reason: str) -> None:
        if (pool := self._pool_of(key)) is not None:
            pool.end(key, reason)

    def _pool_of(self, key: RequestKey) -> PrefillPool | None:
        return next((pool for pool in self._pools if key in pool.entries), None)

    def _stats(self) -> worker_pb2.WorkerStats:
        return self._intake.stats([peer for pool in self._pools for peer in pool.transfers()])
