"""The threads of the C++ kernels: who computes, and when they stop."""

import ctypes
import subprocess
import sys
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


FORKS = """
import ctypes, os, threading, time
import torch
from kernels.ops import select_ops
cpu = select_ops("cpu")
torch.set_num_threads(2)
linear, x = cpu.linear(torch.randn(256, 128), None), torch.randn(64, 128)
expected = linear(x)
rows = torch.randn(20_000, 128)
stop = threading.Event()
def compute():
    while not stop.is_set():
        linear(rows)
thread = threading.Thread(target=compute, daemon=True)
thread.start()
deadline_s = time.monotonic() + 60
for _ in range(20):
    child = os.fork()
    if child == 0:
        flag = ctypes.c_int32(0)
        cpu.set_lent_threads([ctypes.addressof(flag)])
        os._exit(0 if torch.equal(linear(x), expected) else 1)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline_s:
            os.kill(child, 9)
            raise SystemExit("a forked process hangs")
    assert ended[1] == 0
stop.set()
thread.join()
"""


def test_a_process_that_was_forked_beside_a_region_computes_too() -> None:
    run_alone(FORKS)


FEW_THREADS = """
import ctypes, os, resource, signal
import torch
from kernels.ops import select_ops
cpu = select_ops("cpu")
torch.set_num_threads(1)
linear, x = cpu.linear(torch.randn(2048, 128), None), torch.randn(64, 128)
expected = linear(x)
idle = ctypes.c_int32(0)
cpu.set_lent_threads([ctypes.addressof(idle)] * 63)
# NOTE: the address space, since limits on the number of threads do not hold for root.
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (40 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
assert all(torch.equal(linear(x), expected) for _ in range(50))
assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
tasks = os.listdir("/proc/self/task")
names = [open(f"/proc/self/task/{task}/comm").read() for task in tasks]
assert 0 < sum("helper" in name for name in names) < 63, names
"""


def test_where_the_system_allows_fewer_threads_fewer_compute() -> None:
    run_alone(FEW_THREADS)


def run_alone(code: str) -> None:
    """In a process of its own."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
