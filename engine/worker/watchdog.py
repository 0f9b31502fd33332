"""Which rank is to blame when a step does not end: pure functions on what the ranks have said."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protos import worker_pb2


@dataclass(slots=True, eq=False)
class Progress:
    """What the leader knows of one follower's steps."""

    rank: int
    sent: int = 0
    """Number of the last step that it was given."""
    received: int = 0
    done: int = 0
    since_s: float = 0.0
    """When it last finished a step, or was given one while it had none."""
    num_collectives: int | None = None
    """Calls in its step, by its answer to a ping; None: it has not answered."""
    collectives: Sequence[worker_pb2.CollectiveCount] = field(default_factory=tuple)
    """Totals as of its last step."""

    def give(self, step: int, now_s: float) -> None:
        """It is given a step."""
        if self.done == self.sent:
            self.since_s = now_s
        self.sent = step

    def is_late(self, now_s: float, timeout_s: float) -> bool:
        """Whether its step should have ended."""
        return self.done < self.sent and now_s - self.since_s > timeout_s


def blame(late: Sequence[Progress], own_collectives: int) -> list[int]:
    """The ranks that keep the others waiting, of those that are late, and the leader.

    Those that have not begun; else those that do not answer; else those that have made the fewest
    collective calls: whoever has made more waits for them. own_collectives: the leader's.
    """
    if idle := [p.rank for p in late if p.received < p.sent]:
        return sorted(idle)
    if silent := [p.rank for p in late if p.num_collectives is None]:
        return sorted(silent)
    calls = {0: own_collectives} | {p.rank: p.num_collectives or 0 for p in late}
    if len(set(calls.values())) == 1:
        return sorted(p.rank for p in late)
    return sorted(rank for rank, count in calls.items() if count == min(calls.values()))
