"""What an engine loop answers, collected between flushes and addressed by the leases."""

import time

from engine.request import RequestKey
from engine.worker.convert import key_to_proto
from engine.worker.counters import LoopCounters
from engine.worker.leases import Leases
from engine.worker.session import Outbox
from engine.worker.step import Emitted, group_by_session
from protos import worker_pb2

_STATS_INTERVAL_S, _IDLE_STATS_INTERVAL_S = 1.0, 2.5


class Replies:
    """The loop's side of all sessions; owned by the loop thread."""

    def __init__(self, leases: Leases, outbox: Outbox, counters: LoopCounters) -> None:
        self._leases = leases
        self._outbox = outbox
        self._counters = counters
        self._queued: list[tuple[int, worker_pb2.WorkerMessage]] = []
        self._next_stats_s = 0.0
        self._was_idle = True

    def send(self, key: RequestKey, message: worker_pb2.WorkerMessage) -> None:
        """Queue a message for the session that `key` came over; dropped if its lease is gone."""
        session_id = self._leases.session_of(key)
        if session_id is not None:
            self._queued.append((session_id, message))

    def tokens(self, emitted: list[Emitted]) -> None:
        """Queue the tokens of a step, one message per session."""
        self._queued += group_by_session(emitted, self._leases.session_of)

    def failed(
        self,
        key: RequestKey,
        code: worker_pb2.FailureCode.ValueType,
        reason: str,
        *,
        is_counted: bool = True,
    ) -> None:
        """Say that the attempt is over, and count it."""
        if is_counted:
            self._counters.failures[worker_pb2.FailureCode.Name(code).lower()] += 1
        failed = worker_pb2.Failed(key=key_to_proto(key), code=code, message=reason)
        self.send(key, worker_pb2.WorkerMessage(failed=failed))

    def released(self, key: RequestKey) -> None:
        """Say that nothing is held for `key`, and end its lease."""
        self.send(key, _released(key))
        self._leases.drop(key)

    def unknown(self, session_id: int, key: RequestKey) -> None:
        """Answer a Cancel of a key that is not here, so that the proxy's books close."""
        self._counters.num_stale_messages += 1
        self._queued.append((session_id, _released(key)))

    def adapter_changed(self, session_id: int, name: str, error: str, adapter_key: str) -> None:
        """Answer a SetAdapter."""
        changed = worker_pb2.AdapterChanged(name=name, error=error, key=adapter_key)
        self._queued.append((session_id, worker_pb2.WorkerMessage(adapter_changed=changed)))

    def flush(self) -> None:
        """Hand everything queued to the sessions."""
        queued, self._queued = self._queued, []
        self._outbox.send(queued)

    def stats_due(self) -> bool:
        """Whether stats should go out now: every second or, while idle, every 2.5; at changes.

        At multiples of that on the host's clock: a proxy wakes once for all its workers.
        """
        is_idle, now_s = len(self._leases) == 0, time.monotonic()
        if now_s < self._next_stats_s and is_idle == self._was_idle:
            return False
        interval_s = _IDLE_STATS_INTERVAL_S if is_idle else _STATS_INTERVAL_S
        self._next_stats_s, self._was_idle = (now_s // interval_s + 1) * interval_s, is_idle
        return True

    def idle_s(self) -> float:
        """How long a loop that tracks no request has nothing to do: until stats are due."""
        return max(0.0, self._next_stats_s - time.monotonic())

    def stats(self, stats: worker_pb2.WorkerStats) -> None:
        """Send stats to every session."""
        self.broadcast(worker_pb2.WorkerMessage(stats=stats))

    def broadcast(self, message: worker_pb2.WorkerMessage) -> None:
        """Send a message to every session, behind what is queued."""
        self.flush()
        self._outbox.broadcast(message)

    def answer(self, session_id: int, message: worker_pb2.WorkerMessage) -> None:
        """Queue a message for one session."""
        self._queued.append((session_id, message))


def _released(key: RequestKey) -> worker_pb2.WorkerMessage:
    return worker_pb2.WorkerMessage(released=worker_pb2.Released(key=key_to_proto(key)))
