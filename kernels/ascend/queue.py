"""An NPU's stream as a `DeviceQueue`: copies from and to pinned memory, and an event per step.

Source: torch_npu 2.13.0, torch_npu/npu/streams.py; a copy waits for the stream unless the host's
memory is pinned and the copy is asked not to block.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from kernels.device_queue import Deadline, Wait

POLL_INTERVAL_S = 0.0002
"""Between two looks at an event: far below what a layer of a prompt takes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Launched(Generic[T]):
    """Implements `kernels.device_queue.Pending`."""

    value: T
    event: Any

    def result(self) -> T:
        """See `Pending`."""
        self.event.synchronize()
        return self.value


def mark(npu: Any) -> Wait:
    """What waits until the current stream of the calling thread is as far as it was filled then.

    npu: torch.npu.
    """
    event = npu.Event()
    event.record()

    def wait(deadline: Deadline) -> bool:
        # NOTE: not synchronize(), which a device that hangs never returns from.
        while not event.query():
            if time.monotonic() >= deadline():
                return False
            time.sleep(POLL_INTERVAL_S)
        return True

    return wait


class StreamQueue:
    """The current stream of the thread that submits; see `DeviceQueue`."""

    def __init__(self, npu: Any, device: torch.device, *, pins: bool = True) -> None:
        """npu: torch.npu. pins: whether host memory can be pinned, as on any machine with NPUs."""
        self._npu = npu
        self._device = device
        self._pins = pins

    def submit(self, work: Callable[[], T]) -> _Launched[T]:
        """See `DeviceQueue`."""
        value = work()
        event = self._npu.Event()
        event.record()
        return _Launched(value, event)

    def host_ints(self, size: int) -> Tensor:
        """See `DeviceQueue`."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=self._pins)

    def to_device(self, values: Tensor) -> Tensor:
        """See `DeviceQueue`."""
        if self._pins and not values.is_pinned():
            values = values.pin_memory()
        return values.to(self._device, non_blocking=True)

    def to_host(self, values: Tensor) -> Tensor:
        """See `DeviceQueue`."""
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pins)
        return host.copy_(values, non_blocking=True)

    def close(self) -> None:
        """See `DeviceQueue`."""
