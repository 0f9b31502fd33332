"""Operators that multiply and communicate, between threads that are ranks; see simulator.py."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.npu.simulation import demand, kernel

_TIMEOUT_S = 60.0
_this = threading.local()
_hubs: dict[str, "Hub"] = {}


class Hub:
    """Where threads, each a rank, meet; known to the operators by its name."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size

    def run(self, job: Callable[["ThreadGroup"], Any]) -> list[Any]:
        """job(group) in a thread per rank; what they return, by rank."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def be(rank: int) -> None:
            _this.rank = rank
            try:
                results[rank] = job(ThreadGroup(self, rank))
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        _hubs[self.name] = self
        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        del _hubs[self.name]
        if errors:
            raise errors[0]
        return results

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Everybody's value."""
        self._given[rank] = value
        self._barrier.wait(_TIMEOUT_S)
        values = list(self._given)
        self._barrier.wait(_TIMEOUT_S)
        return values


class ThreadGroup:
    """Implements engine.collectives.Group."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self.rank, self.size = rank, hub.size
        self.communicator = hub.name

    def all_reduce(self, x: Tensor) -> Tensor:
        total: Tensor = sum(self._hub.exchange(self.rank, x))  # type: ignore[assignment]
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._hub.exchange(self.rank, x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x).chunk(self.size)[self.rank]

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        value: Tensor = self._hub.exchange(self.rank, x)[source]
        return value


def _group(hcom: str, world_size: int, x: Tensor, weight: Tensor) -> ThreadGroup:
    hub = _hubs[hcom]
    demand(world_size == hub.size and world_size in (2, 4, 8, 16), "2, 4, 8 or 16 ranks")
    demand(x.dim() == weight.dim() == 2 and x.is_contiguous(), "plain matrices")
    demand(256 <= x.shape[1] < 65535 and x.shape[1] == weight.shape[0], "k is from 256 to 65534")
    return ThreadGroup(hub, _this.rank)


@kernel("npu_mm_reduce_scatter_base")
def mm_reduce_scatter(
    x: Tensor, weight: Tensor, hcom: str, world_size: int, *, reduce_op: str = "sum", **unused: Any
) -> Tensor:
    demand(not any(unused.values()) and reduce_op == "sum", "sums without a bias")
    demand(x.shape[0] % world_size == 0, "m is a multiple of the ranks")
    return _group(hcom, world_size, x, weight).reduce_scatter(x @ weight)


@kernel("npu_all_gather_base_mm")
def all_gather_mm(
    x: Tensor,
    weight: Tensor,
    hcom: str,
    world_size: int,
    *,
    gather_output: bool = True,
    **unused: Any,
) -> tuple[Tensor, Tensor]:
    demand(not any(unused.values()) and not gather_output, "the product alone, without a bias")
    gathered = _group(hcom, world_size, x, weight).all_gather(x)
    return gathered @ weight, torch.full((1,), torch.nan)
