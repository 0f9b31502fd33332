"""What both roles do with a proxy's requests: take them in under a lease, find the overdue ones."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from engine.errors import EngineError
from engine.request import Request, RequestKey, RequestState
from engine.scheduler import QueueFull
from engine.worker.assembly import Engine
from engine.worker.convert import key_from_proto, request_from_proto
from engine.worker.leases import Leases
from engine.worker.replies import Replies
from engine.worker.stats import build_stats
from protos import worker_pb2
from protos.block_hash import kv_identity


class Tracked(Protocol):
    """A request as a loop keeps it."""

    @property
    def request(self) -> Request:
        """The request."""
        ...

    @property
    def ending(self) -> bool:
        """It is over, and only waits until nothing touches its blocks."""
        ...


class Intake:
    """The loop's books on who asked for what and until when; owned by the loop thread."""

    def __init__(self, engine: Engine, leases: Leases, replies: Replies) -> None:
        self.replies = replies
        self._engine = engine
        self._leases = leases

    def admit(
        self,
        session_id: int,
        key: worker_pb2.RequestKey,
        work: worker_pb2.Work,
        accept: Callable[[Request], None],
    ) -> Request | None:
        """Grant a lease and hand the request to `accept`; None: refused, and the proxy told why.

        accept: may raise ValueError (invalid) or QueueFull (overloaded); it then keeps nothing.
        """
        hello, request_key = self._engine.hello, key_from_proto(key)
        self._leases.grant(request_key, session_id, time.monotonic())
        try:
            request = request_from_proto(
                key,
                work,
                adapter=self._adapter(work.adapter),
                kv_identity=kv_identity(hello.model, hello.layout),
                vocab_size=hello.vocab_size,
            )
            accept(request)
        except ValueError as error:
            self._refuse(request_key, worker_pb2.FAILURE_INVALID, str(error))
        except QueueFull as error:
            self._refuse(request_key, worker_pb2.FAILURE_OVERLOADED, str(error))
        else:
            self._engine.steps.expect(request)
            return request
        return None

    def set_adapter(
        self, session_id: int, message: worker_pb2.SetAdapter, tracked: Iterable[Tracked]
    ) -> None:
        """Load or unload an adapter and say how it went; `tracked` requests keep theirs."""
        adapters, error, adapter_key = self._engine.adapters, "", ""
        try:
            if adapters is None:
                raise ValueError(
                    "adapters go with tp alone: not with dp, cp, pp, ep or sequence_parallel"
                )
            if message.path:
                adapters.load(message.name, Path(message.path))
                adapter_key = adapters.key(message.name)
            elif message.name in adapters.names:
                adapters.unload(message.name)
            adapters.free({entry.request.adapter for entry in tracked})
        except (ValueError, EngineError, OSError) as problem:
            error = str(problem)
        self.replies.adapter_changed(session_id, message.name, error, adapter_key)

    def _adapter(self, name: str) -> str:
        if not name:
            return ""
        if self._engine.adapters is None:
            raise ValueError(f"adapter {name!r} is not loaded")
        return self._engine.adapters.key(name)

    def _refuse(self, key: RequestKey, code: worker_pb2.FailureCode.ValueType, reason: str) -> None:
        self.replies.failed(key, code, reason)
        self.replies.released(key)

    def renew(self, message: worker_pb2.Renew) -> None:
        """The proxy still wants these keys."""
        self._leases.renew(map(key_from_proto, message.keys), time.monotonic())

    def publish_kv(self) -> None:
        """Tell every proxy what changed in the prefix cache."""
        events = self._engine.kv_events.take()
        if events is not None:
            self.replies.broadcast(worker_pb2.WorkerMessage(kv_events=events))

    def resync_kv(self, session_id: int) -> None:
        """Tell one proxy all of it."""
        hashes = [h for pool in self._engine.pools for h in pool.blocks.findable()]
        events = self._engine.kv_events.snapshot(hashes)
        self.replies.answer(session_id, worker_pb2.WorkerMessage(kv_events=events))

    def of_session(self, session_id: int) -> list[RequestKey]:
        """Every key that came over a stream."""
        return self._leases.of_session(session_id)

    def overdue(self, tracked: Mapping[RequestKey, Tracked]) -> list[tuple[RequestKey, str]]:
        """Requests whose lease or deadline has passed, and why; the proxy is told, once.

        The caller ends them. A prompt that was computed in time is the decoder's business: while
        it is being sent, only its lease counts.
        """
        now_s = time.monotonic()
        found: list[tuple[RequestKey, str]] = []
        expired = set(self._leases.expired(now_s))
        for key, entry in tracked.items():
            state = entry.request.state
            if entry.ending:
                continue
            if key in expired:
                self._engine.counters.num_expired_leases += 1
                code, reason = worker_pb2.FAILURE_LEASE, "the proxy did not renew its lease"
            elif entry.request.deadline_s <= now_s and state is not RequestState.SENDING:
                code, reason = worker_pb2.FAILURE_DEADLINE, f"deadline passed while {state.value}"
            else:
                continue
            self.replies.failed(key, code, reason)
            found.append((key, reason))
        return found

    def stats(
        self,
        transfers: Sequence[worker_pb2.TransferPeerStats],
        num_pending: Sequence[int] | None = None,
    ) -> worker_pb2.WorkerStats:
        """The worker's state between two steps.

        num_pending: by data-parallel rank, the requests that wait outside its scheduler.
        """
        stats = build_stats(self._engine, num_pending or [0] * len(self._engine.pools))
        stats.num_leases = len(self._leases)
        stats.transfers.extend(transfers)
        return stats
