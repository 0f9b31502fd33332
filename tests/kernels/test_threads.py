"""The threads of the C++ kernels: who computes, and when they stop."""

import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.ops import Ops


@pytest.fixture
def flag(cpu: Ops) -> Iterator[ctypes.c_int32]:
    """One thread of our own, and one that is lent while the flag is 0."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    flag = ctypes.c_int32(0)
    cpu.set_lent_threads([ctypes.addressof(flag)])
    yield flag
    cpu.set_lent_threads([])
    torch.set_num_threads(threads)


def helpers_ns() -> int:
    """Nanoseconds that helper threads were on a core."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if "helper" in name_of(task)]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def name_of(task: Path) -> str:
    return (task / "comm").read_text()


def settled_ns() -> int:
    """helpers_ns once it stands still: helpers that wait are asleep."""
    deadline_s = time.monotonic() + 10.0
    before = helpers_ns()
    while time.monotonic() < deadline_s:
        time.sleep(0.05)
        if (now := helpers_ns()) == before:
            return now
        before = now
    raise AssertionError("helpers are still running, with nothing to do")


@pytest.fixture
def work(cpu: Ops) -> Callable[[], torch.Tensor]:
    linear, x = cpu.linear(torch.randn(1024, 512), None), torch.randn(64, 512)
    return lambda: linear(x)


def test_a_lent_thread_computes_until_its_lender_is_busy(
    flag: ctypes.c_int32, work: Callable[[], torch.Tensor]
) -> None:
    expected = work()
    before = settled_ns()
    assert all(torch.equal(work(), expected) for _ in range(200))
    lent = settled_ns()
    assert lent > before
    flag.value = 1
    assert all(torch.equal(work(), expected) for _ in range(200))
    assert settled_ns() == lent


def test_results_are_right_when_several_threads_call(
    flag: ctypes.c_int32, work: Callable[[], torch.Tensor]
) -> None:
    expected = work()

    def call(_: int) -> bool:
        return all(torch.equal(work(), expected) for _ in range(50))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(call, range(8)))
