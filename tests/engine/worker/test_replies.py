"""When an engine loop tells proxies its numbers."""

import asyncio

import pytest

from engine.worker import replies as replies_module
from engine.worker.counters import LoopCounters
from engine.worker.leases import Leases
from engine.worker.replies import Replies
from engine.worker.session import Outbox


class Clock:
    """Stands in for the module `time`."""

    now_s = 101.3

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(replies_module, "time", clock)
    return clock


def make(leases: Leases) -> Replies:
    loop = asyncio.new_event_loop()
    loop.close()
    return Replies(leases, Outbox(loop), LoopCounters())


def test_stats_of_idle_workers_come_at_the_same_moments(clock: Clock) -> None:
    early = make(Leases(4.0))
    assert early.stats_due()
    clock.now_s = 102.1
    late = make(Leases(4.0))
    assert late.stats_due()
    assert not early.stats_due()
    assert early.idle_s() == late.idle_s() == pytest.approx(0.4)
    clock.now_s = 102.5
    assert early.stats_due()
    assert late.stats_due()
    assert early.idle_s() == pytest.approx(2.5)


def test_stats_come_at_once_when_work_comes_and_then_every_second(clock: Clock) -> None:
    leases = Leases(4.0)
    replies = make(leases)
    assert replies.stats_due()
    leases.grant(("request", 0), 1, clock.now_s)
    assert replies.stats_due()
    assert not replies.stats_due()
    clock.now_s = 102.0
    assert replies.stats_due()
