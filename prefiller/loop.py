"""What a prefiller's engine loop does of its own: it computes prompts, pushes their KV and reports
first tokens.

    Prefill --the least loaded data-parallel rank--> prefix fetched from the tiers, if there are any
      --> PrefillPool of that rank
    step: schedule every pool --> one forward pass of all ranks --> first tokens
    with layers in stages: a step begins, and tokens of another one come, which has ended meanwhile
"""

from collections.abc import Callable, Sequence

from engine.request import Request
from engine.scheduler_output import ScheduledRequest
from engine.worker.assembly import Engine
from engine.worker.convert import key_from_proto
from engine.worker.inbox import Inbox
from engine.worker.intake import Intake
from engine.worker.loop import CommonEvent, Pools
from engine.worker.pipeline import StepEnded
from engine.worker.step import Emitted
from kvtransfer.connector import TransferResult
from prefiller.pool import PrefillPool
from protos import worker_pb2

PrefillEvent = CommonEvent | TransferResult | StepEnded


class PrefillRole:
    """See the module's docstring; implements `engine.worker.loop.Role`."""

    def __init__(
        self,
        engine: Engine,
        intake: Intake,
        inbox: Inbox[PrefillEvent],
        pools: Pools[PrefillPool],
    ) -> None:
        """inbox: gets a StepEnded whenever the last stage has ended a step."""
        self._pools = pools
        self._steps = engine.steps
        self._pipeline = engine.pipeline
        if self._pipeline is not None:
            self._pipeline.listen(inbox.put)
        self._counters = engine.counters
        self._intake = intake
        self._replies = intake.replies

    def step(self) -> bool:
        """See `Role`."""
        self._replies.flush()
        if self._pipeline is not None:
            self._conclude(self._pipeline.ended())
        scheduled = self._scheduled()
        if not any(scheduled):
            self._steps.idle()
            return False
        self._compute(scheduled)
        return True

    def take_event(self, event: TransferResult | StepEnded) -> None:
        """See `Role`; a step that ended is looked after once a round."""
        if isinstance(event, TransferResult):
            if (pool := self._pools.of(event.key)) is None:
                self._counters.num_stale_messages += 1
            else:
                pool.conclude(event)

    def take_message(self, session_id: int, message: worker_pb2.ProxyMessage) -> bool:
        """See `Role`."""
        if message.WhichOneof("message") != "prefill":
            return False
        self._prefill(session_id, message.prefill)
        return True

    def num_pending(self) -> list[int]:
        """See `Role`."""
        return [0 for _ in self._pools]

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
            self._pools.computing(request.key).finish_transfer(request)

    def _prefill(self, session_id: int, message: worker_pb2.Prefill) -> None:
        if self._pools.of(key_from_proto(message.key)) is not None:
            self._counters.num_stale_messages += 1
            return
        self._intake.admit(session_id, message.key, message.work, self._acceptor(message.target))

    def _acceptor(self, target: worker_pb2.KVTarget) -> Callable[[Request], None]:
        def accept(request: Request) -> None:
            self._pools.for_new(request).accept(request, target)

        return accept
