"""How an engine hands work to its device and goes on: one interface for CPUs and NPUs.

Work runs in the order in which it was submitted. On an NPU that is what a stream does: submitting
launches. On a CPU one thread stands in for the stream; the kernels run without Python's lock.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Deadline = Callable[[], float]
"""By when something has to be done, on time.monotonic(); it may come closer meanwhile."""
Wait = Callable[[Deadline], bool]
"""Wait, on any thread, until the device has done something; False: the deadline passed before."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Work that was submitted."""

    def result(self) -> T_co:
        """Wait until the device has done it; what it returned. Raises what it raised."""
        ...


class DeviceQueue(Protocol):
    """Used by one thread."""

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """Let the device do it after what was submitted before; does not wait for that.

        NOTE: on a device with streams, `work` only launches, and runs before this returns.
        """
        ...

    def host_ints(self, size: int) -> Tensor:
        """[size] int32 zeros in memory of the host that `to_device` copies from without waiting."""
        ...

    def to_device(self, values: Tensor) -> Tensor:
        """Values of the host where the ops work; on a CPU these very values.

        They must not change before work that reads them is done.
        """
        ...

    def to_host(self, values: Tensor) -> Tensor:
        """To be called by work: values that can be read when it is done."""
        ...

    def close(self) -> None:
        """Let go of threads, once what was submitted is done."""
        ...


def nothing_to_wait_for(deadline: Deadline) -> bool:
    """What `Ops.mark` gives where calls return when they are done."""
    return True


class ThreadQueue:
    """For ops that compute on the calling thread and its helpers."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="device")

    def submit(self, work: Callable[[], T]) -> Pending[T]:
        """See `DeviceQueue`."""
        return self._pool.submit(work)

    def host_ints(self, size: int) -> Tensor:
        """See `DeviceQueue`."""
        return torch.zeros(size, dtype=torch.int32)

    def to_device(self, values: Tensor) -> Tensor:
        """See `DeviceQueue`."""
        return values

    def to_host(self, values: Tensor) -> Tensor:
        """See `DeviceQueue`."""
        return values

    def close(self) -> None:
        """See `DeviceQueue`."""
        self._pool.shutdown()
