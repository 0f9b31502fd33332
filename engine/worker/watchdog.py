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

    def is_late(self, now_s: float, timeout_s: float, before: "Sequence[Progress]" = ()) -> bool:
        """Whether its step should have ended. before: ranks whose result it takes, a stage earlier;
        until they have ended that step too, they are late and not this one.
        """
        if any(p.done <= self.done for p in before):
            return False
        since_s = max([self.since_s, *(p.since_s for p in before)])
        return self.done < self.sent and now_s - since_s > timeout_s


def first_late_stage(late: Sequence[Progress], stage_size: int) -> list[Progress]:
    """Those of the first stage that is late: later ones may only wait for it."""
    first = min(p.rank // stage_size for p in late)
    return [p for p in late if p.rank // stage_size == first]


def blame(late: Sequence[Progress], own_collectives: int, *, leads: bool = True) -> list[int]:
    """The ranks that keep the others waiting, of those that are late, and the leader.

    Those that have not begun; else those that do not answer; else those that have made the fewest
    collective calls: whoever has made more waits for them. own_collectives: the leader's.
    leads: whether it computes with them.
    """
    if idle := [p.rank for p in late if p.received <= p.done]:
        return sorted(idle)
    if silent := [p.rank for p in late if p.num_collectives is None]:
        return sorted(silent)
    calls = {p.rank: p.num_collectives or 0 for p in late}
    if leads:
        calls[0] = own_collectives
    if len(set(calls.values())) == 1:
        return sorted(p.rank for p in late)
    return sorted(rank for rank, count in calls.items() if count == min(calls.values()))
