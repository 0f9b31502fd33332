"""Linears that all ranks need and few hold: rank i of n has those of every n-th layer.

    layer            0          1          2          3
    held by rank     0          1          0          1        of two
    computes         0          1          2          3
    on its way           1          2          3          0    beside what is computed

Only ranks with the same part of a weight can hold it for each other: for what is split over the
tensor-parallel group, those of the same tp_rank; for what is whole, all ranks of the engine. Beyond
its own layers a rank has two buffers of one layer. All ranks run the same layers in the same order.

Source: the layer sharding of vllm-ascend's documentation (feature guide, "Layer Sharding Linear").
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from engine.collectives import ProcessGroup
from engine.config import Quantization
from engine.layers.linear import FusedLinear
from engine.parallel import Parallel
from engine.turns import Pending
from kernels.ops import Linear

_KIND_BYTES = 512


@dataclass(frozen=True, slots=True)
class ShardedBytes:
    """Of the linears that are dealt out, in one rank; packed."""

    whole: int = 0
    """What it would hold without."""
    held: int = 0
    """What it holds, buffers included."""


class ShardedSeries:
    """Implements engine.layers.linear.LinearSeries; belongs to one engine loop thread."""

    def __init__(self, name: str, linears: Sequence[FusedLinear], group: ProcessGroup) -> None:
        """linears: one per layer, in the order in which they are called; not loaded yet."""
        self.quantization: Quantization = "none"
        self._name = name
        self._linears = linears
        self._group = group
        self._buffers: list[Linear] = []
        self._turn = 0
        self._current = -1
        self._next = -1
        self._pending: list[Pending] = []
        for index, linear in enumerate(linears):
            linear.join_series(self, index, is_held_here=self._owner(index) == group.rank)

    def fetch(self, index: int) -> Linear:
        """Wait for the weights of a layer, and let those of the next one come."""
        if index != self._current:
            if not self._buffers:
                self._prepare()
            if index != self._next:
                self._wait()
                self._start(index)
            self._wait()
            self._current = index
            self._start((index + 1) % len(self._linears))
        held = self._linears[index].held
        # NOTE: the other buffer is being written by now; this one is the next to be.
        return self._buffers[self._turn] if held is None else held

    def num_bytes(self) -> ShardedBytes:
        """Once the weights are loaded."""
        if not self._buffers:
            self._make_buffers()
        one = self._buffers[0].packed().num_bytes
        num_held = sum(linear.held is not None for linear in self._linears)
        return ShardedBytes(one * len(self._linears), one * (num_held + 2))

    def _owner(self, index: int) -> int:
        return index % self._group.size

    def _make_buffers(self) -> None:
        self._buffers = [self._linears[0].empty(self.quantization) for _ in range(2)]

    def _prepare(self) -> None:
        """Make the buffers, and see that every layer of every rank fits into them."""
        if not self._buffers:
            self._make_buffers()
        kinds = {self._buffers[0].packed().kind}
        kinds |= {linear.held.packed().kind for linear in self._linears if linear.held is not None}
        text = "|".join(sorted(kinds)).encode()[:_KIND_BYTES].ljust(_KIND_BYTES)
        found = self._group.all_gather(torch.frombuffer(bytearray(text), dtype=torch.uint8)[None])
        if len(kinds) > 1 or not bool((found == found[0]).all()):
            raise ValueError(
                f"layer_sharding of {self._name}: its layers are packed in several forms; use a "
                "quantization other than native"
            )

    def _start(self, index: int) -> None:
        """Let the weights of a layer go to all ranks, into the buffer that is not in use."""
        held = self._linears[index].held
        weights = (self._buffers[self._turn] if held is None else held).packed()
        owner = self._owner(index)
        self._pending = [self._group.start_broadcast(t.detach(), owner) for t in weights.tensors]
        self._turn = 1 - self._turn
        self._next = index

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending = []


def shard_layers(model: nn.Module, parallel: Parallel) -> list[ShardedSeries]:
    """Deal the linears of the configuration out over ranks; before the weights are loaded.

    Raises: ValueError: there is no such linear, or no other rank has the same part of it.
    """
    series = []
    taken: set[int] = set()
    for name in parallel.config.layer_sharding:
        if parallel.side is not None and name in (
            "gate_up_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ):
            raise ValueError(
                f"layer_sharding of {name} and shared_experts_beside: only one of them"
            )
        linears = [linear for linear in _named(model, name) if id(linear) not in taken]
        taken |= {id(linear) for linear in linears}
        if not linears:
            raise ValueError(
                f"layer_sharding names {name}: the model has {', '.join(sorted(_names(model)))}"
            )
        # NOTE: dense and sparse layers may have one of the same name and other widths.
        for shape in dict.fromkeys(map(_shape, linears)):
            alike = [linear for linear in linears if _shape(linear) == shape]
            group = parallel.copies if alike[0].is_split else parallel.everyone
            if group is None:
                raise ValueError(
                    f"layer_sharding of {name}: no other rank holds the same weights; they are "
                    "split over tp, so it takes dp or cp above 1"
                )
            series.append(ShardedSeries(name, alike, group))
    return series


def _named(model: nn.Module, name: str) -> list[FusedLinear]:
    return [
        module
        for path, module in model.named_modules()
        if isinstance(module, FusedLinear)
        and ".layers." in path
        and (path.rpartition(".")[2] == name or name in module.names)
    ]


def _names(model: nn.Module) -> Collection[str]:
    return {
        name
        for path, module in model.named_modules()
        if isinstance(module, FusedLinear) and ".layers." in path
        for name in module.names
    }


def _shape(linear: FusedLinear) -> tuple[int, int, bool]:
    return len(linear.inputs), linear.out_features, linear.is_split
