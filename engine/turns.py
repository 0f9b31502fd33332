"""Two computations of one rank that take turns: one computes while the other waits for its peers.

    first     compute | collective ......... | compute | collective ...
    second            | compute | collective ......... | compute

One of them runs at any time, and they change places at collectives alone, strictly in turn. So the
order in which a rank starts its collectives follows from what it computes, never from how fast
anything is: all ranks that run the same two computations start them in the same order. Each has a
thread, but only to keep its place: layers need not know that they are interrupted.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Pending(Protocol):
    """An operation that goes on beside what this rank computes."""

    def wait(self) -> object:
        """Until it is done here. Raises: RuntimeError: a peer is gone or late."""
        ...


class _OtherFailed(Exception):
    """Ends a computation, since there is nothing that could be made of its result."""


class Turns:
    """Belongs to one engine loop thread."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "second-half")
        self._gates = (Semaphore(0), Semaphore(0))
        self._running = 0
        self._has_failed = False
        self.are_shared = False
        """Whether there are two computations under way."""

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """What both return; `second` is computed on another thread.

        Raises: what the one that fails raises; the other one is given up at its next turn.
        """
        assert not self.are_shared, "turns are for two"
        is_inference, num_threads = torch.is_inference_mode_enabled(), torch.get_num_threads()

        def run_second() -> T:
            self._gates[1].acquire()
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
            with torch.inference_mode(is_inference):
                return self._to_the_end(1, second)

        self._running, self._has_failed, self.are_shared = 0, False, True
        result = self._pool.submit(run_second)
        try:
            own = self._to_the_end(0, first)
        except _OtherFailed:
            result.result()
            raise
        except BaseException:
            result.exception()  # no thread is left behind in a half that failed
            raise
        return own, result.result()

    def wait(self, pending: Pending) -> None:
        """Let the other compute, then see that `pending` is done."""
        self.pass_on()
        pending.wait()

    def pass_on(self) -> None:
        """Let the other compute until it passes on or ends."""
        if not self.are_shared:
            return
        own = self._running
        self._running = 1 - own
        self._gates[1 - own].release()
        self._gates[own].acquire()
        if self._has_failed:
            raise _OtherFailed

    def _to_the_end(self, own: int, compute: Callable[[], T]) -> T:
        try:
            if self._has_failed:
                raise _OtherFailed
            return compute()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            if self.are_shared:
                self.are_shared = False
                self._gates[1 - own].release()
