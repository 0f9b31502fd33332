"""The experts of one rank, and the way to those of others, as a backend may offer them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

GroupedProduct = Callable[[Tensor, Tensor], Tensor]
"""product(rows [R, in] sorted by group, group_sizes [groups] int64) -> [R, out]."""


class GatedExperts(Protocol):
    """down(silu(gate(x)) * up(x)) with weights per expert, on the rows of each."""

    def __call__(self, rows: Tensor, group_sizes: Tensor) -> Tensor:
        """rows: [R, H], sorted by expert; group_sizes: [experts] int64, rows of each -> [R, H].

        Rows past the sum of the sizes may be there where `ExpertDispatch` made them: what is
        returned in their places is undefined.
        """
        ...


class ExpertsByParts:
    """One product, the activation, the other product."""

    def __init__(
        self, gate_up: GroupedProduct, down: GroupedProduct, silu_mul: Callable[[Tensor], Tensor]
    ) -> None:
        self._gate_up = gate_up
        self._down = down
        self._silu_mul = silu_mul

    def __call__(self, rows: Tensor, group_sizes: Tensor) -> Tensor:
        """See `GatedExperts`."""
        return self._down(self._silu_mul(self._gate_up(rows, group_sizes)), group_sizes)


class SharedExpert(NamedTuple):
    """The MLP that computes every token, whole on every rank, in two halves."""

    up: Callable[[Tensor], Tensor]
    """x [T, H] -> silu(gate(x)) * up(x), [T, I]."""
    down: Callable[[Tensor], Tensor]
    """[T, I] -> [T, H]."""


class ExchangeGroup(Protocol):
    """Ranks that deal experts out among themselves."""

    rank: int
    """Of this process, within the group."""
    size: int

    @property
    def communicator(self) -> str:
        """The name by which the device's operators communicate over this group."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeSizes:
    """What is exchanged in every sparse layer; the same on all ranks of a group."""

    num_experts: int
    """Of all ranks together, copies counted; each has as many, in order of the ranks."""
    num_experts_per_tok: int
    """Different ones for each row."""
    hidden_size: int
    """Width of a row."""
    max_tokens: int
    """Most rows that one rank hands over in a step."""
    is_even: bool
    """Whether all ranks always hand over equally many rows."""


class ExpertDispatch(Protocol):
    """Rows to the experts of other ranks and sums back, by operators of the device.

    Shapes do not depend on where rows go, and nothing is read on the host: it may be in a graph.
    """

    max_tokens: int
    """Most rows of a call."""

    def __call__(
        self,
        x: Tensor,
        topk_weights: Tensor,
        expert_ids: Tensor,
        experts: GatedExperts,
        shared: SharedExpert | None,
        active: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each row's experts, and of the shared one: [T, H].

        x: [T, H]; topk_weights: [T, k] float32; expert_ids: [T, k], different ones in each row;
        experts: this rank's own. Every rank of the group calls it, with at least one row.
        active: [T] bool, the first rows, or none; others do not travel, and what is returned in
        their places is undefined. Given on all ranks or on none, which then have as many rows.
        """
        ...
