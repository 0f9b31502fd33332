"""Between two blocks a row of the residual stream lives on every rank of a tensor-parallel group,
or on one.

    replicated: block --partial sums--> AllReduce -----> norm [T] ----------------> block
    scattered:  block --partial sums--> ReduceScatter -> norm [T / tp] -> AllGather -> block

Scattered rows move as many bytes, in halves that a block may place where rows are smallest, and
what lies between computes each row once. T is padded to a multiple of tp, at the tail.

Source: sequence parallelism (arXiv 2205.05198).
"""

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from engine.collectives import Group
from engine.layers.linear import FusedLinear
from engine.parallel import Parallel
from kernels.experts import ExchangeGroup


class Rows(Protocol):
    """Where rows are between two blocks."""

    is_scattered: bool

    def gather(self, x: Tensor, num_tokens: int | None = None) -> Tensor:
        """Rows as they are between blocks -> all rows, with the padding unless num_tokens says."""
        ...

    def reduce(self, x: Tensor) -> Tensor:
        """Partial sums of all rows, or of the padded ones -> the sums, as between blocks."""
        ...

    def gather_into(self, linear: FusedLinear, x: Tensor, num_tokens: int | None = None) -> Tensor:
        """linear(gather(x, num_tokens)), as one where the device can."""
        ...

    def reduce_from(self, linear: FusedLinear, x: Tensor) -> Tensor:
        """reduce(linear(x)), as one where the device can."""
        ...

    def own(self, x: Tensor) -> Tensor:
        """All rows, the same on every rank -> as between blocks."""
        ...

    def num_own(self, num_tokens: int) -> int:
        """How many of so many rows a rank has between blocks, with the padding."""
        ...


class ReplicatedRows:
    """Every rank has every row."""

    is_scattered = False

    def __init__(self, group: Group) -> None:
        self._group = group

    def gather(self, x: Tensor, num_tokens: int | None = None) -> Tensor:
        """x: they are here."""
        return x

    def reduce(self, x: Tensor) -> Tensor:
        """AllReduce."""
        return self._group.all_reduce(x)

    def gather_into(self, linear: FusedLinear, x: Tensor, num_tokens: int | None = None) -> Tensor:
        """The product."""
        out: Tensor = linear(x)
        return out

    def reduce_from(self, linear: FusedLinear, x: Tensor) -> Tensor:
        """The product, then AllReduce."""
        return self.reduce(linear(x))

    def own(self, x: Tensor) -> Tensor:
        """x: they are here."""
        return x

    def num_own(self, num_tokens: int) -> int:
        """All."""
        return num_tokens


class ScatteredRows:
    """Every rank has its T / tp rows."""

    is_scattered = True

    def __init__(self, group: Group, fused: ExchangeGroup | None) -> None:
        """fused: the same ranks, for operators that communicate themselves; None: no such."""
        self._group = group
        self._fused = fused

    def gather(self, x: Tensor, num_tokens: int | None = None) -> Tensor:
        """AllGather."""
        return self._group.all_gather(x)[:num_tokens]

    def reduce(self, x: Tensor) -> Tensor:
        """Pad the tail, then ReduceScatter."""
        return self._group.reduce_scatter(self._padded(x))

    def gather_into(self, linear: FusedLinear, x: Tensor, num_tokens: int | None = None) -> Tensor:
        """AllGather and the product, in one operator or two."""
        product = linear.gathered(self._fused)
        if product is not None:
            return product(x)[:num_tokens]
        out: Tensor = linear(self.gather(x, num_tokens))
        return out

    def reduce_from(self, linear: FusedLinear, x: Tensor) -> Tensor:
        """The product and ReduceScatter, in one operator or two."""
        product = linear.reduce_scattered(self._fused)
        return self.reduce(linear(x)) if product is None else product(self._padded(x))

    def own(self, x: Tensor) -> Tensor:
        """Pad the tail, then cut."""
        parts = self._padded(x).chunk(self._group.size)
        return parts[self._group.rank].contiguous()

    def num_own(self, num_tokens: int) -> int:
        """As many as any other rank."""
        return -(-num_tokens // self._group.size)

    def _padded(self, x: Tensor) -> Tensor:
        padding = -len(x) % self._group.size
        return functional.pad(x, (0, 0, 0, padding)) if padding else x


def rows_of(parallel: Parallel) -> Rows:
    """Where the rows of a model of this rank are."""
    config = parallel.config
    scatters = config.ep_size > 1 and config.moe_comm == "zero_redundancy"
    if config.tp_size > 1 and (scatters or config.sequence_parallel):
        return ScatteredRows(parallel.tp, parallel.fused_tp)
    return ReplicatedRows(parallel.tp)
