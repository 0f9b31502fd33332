"""What a decoder's engine loop does of its own: it takes reservations in, and decodes.

Reserve --the least loaded data-parallel rank--> DecodePool of that rank
step: schedule every pool --> one forward pass of all ranks --> tokens
      with async_scheduling, tokens are those of the step before; see engine.async_scheduling
"""

from decoder.pool import DecodePool
from engine.async_scheduling import AsyncScheduling
from engine.request import Request, RequestKey
from engine.worker.assembly import Engine
from engine.worker.convert import key_from_proto
from engine.worker.intake import Intake
from engine.worker.loop import CommonEvent, Pools
from engine.worker.step import Emitted
from kvtransfer.connector import ReceiveEvent
from protos import worker_pb2

DecodeEvent = CommonEvent | ReceiveEvent


class DecodeRole:
    """See the module's docstring; implements `engine.worker.loop.Role`."""

    def __init__(self, engine: Engine, intake: Intake, pools: Pools[DecodePool]) -> None:
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

    def step(self) -> bool:
        """See `Role`."""
        emitted = self._run_step()
        if emitted is None:
            self._steps.idle()
            return False
        self._replies.tokens(emitted)
        for request, _ in emitted:
            if request.finish_reason is not None:
                self._pools.computing(request.key).release(request.key)
        return True

    def take_event(self, event: ReceiveEvent) -> None:
        """See `Role`."""
        if (pool := self._find(event.key)) is not None:
            pool.on_receive_event(event)

    def take_message(self, session_id: int, message: worker_pb2.ProxyMessage) -> bool:
        """See `Role`."""
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
            case _:
                return False
        return True

    def num_pending(self) -> list[int]:
        """See `Role`."""
        return [pool.num_pending for pool in self._pools]

    def _run_step(self) -> list[Emitted] | None:
        """What a step gave, one that was launched before perhaps; None: there is none to run."""
        if self._async_scheduling is not None:
            return self._async_scheduling.step()
        scheduled = [pool.schedule() for pool in self._pools]
        return self._steps.run(scheduled) if any(scheduled) else None

    def _reserve(self, session_id: int, message: worker_pb2.Reserve) -> None:
        if self._pools.of(key_from_proto(message.key)) is not None:
            self._counters.num_stale_messages += 1
            return
        self._intake.admit(session_id, message.key, message.work, self._accept)

    def _accept(self, request: Request) -> None:
        self._pools.for_new(request).accept(request)

    def _find(self, key: RequestKey) -> DecodePool | None:
        """The pool of a key that a message is about; one about a key that is over is counted."""
        pool = self._pools.of(key)
        self._counters.num_stale_messages += pool is None
        return pool
