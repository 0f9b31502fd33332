"""Waiting for signals."""

import os
import signal

from pdserve.alarm import Alarm


def test_without_a_ring_a_wait_ends_by_itself() -> None:
    assert not Alarm().wait(0.0)


def test_rings_add_up_to_no_more_than_a_pipe_holds() -> None:
    alarm = Alarm()
    for _ in range(100_000):  # more than a pipe holds
        alarm.ring()
    assert alarm.wait(10.0)
    while alarm.wait(0.0):
        pass
    assert not alarm.wait(0.0)


def test_a_signal_handler_ends_the_wait_of_its_own_thread() -> None:
    alarm = Alarm()
    previous = signal.signal(signal.SIGALRM, lambda *_: alarm.ring())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert alarm.wait(30.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def test_the_end_of_a_child_ends_the_wait() -> None:
    alarm = Alarm()
    previous = signal.signal(signal.SIGCHLD, lambda *_: alarm.ring())
    try:
        pid = os.spawnlp(os.P_NOWAIT, "true", "true")
        assert alarm.wait(30.0)
        os.waitpid(pid, 0)
    finally:
        signal.signal(signal.SIGCHLD, previous)
