"""The place of a rank in its engine, as plain numbers.

Rank = dp_rank * tp_size + tp_rank. With DP 2, TP 2:

    dp_rank 0: ranks 0 1    tensor-parallel groups: {0 1} {2 3}
    dp_rank 1: ranks 2 3    expert-parallel groups of EP 4: {0 1 2 3}; of EP 2: {0 1} {2 3}

Attention and dense layers are split over a tensor-parallel group; data-parallel groups hold other
requests. Experts are dealt out over an expert-parallel group; with ep_size 1 they are split like
dense layers.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

MoEComm = Literal["zero_redundancy", "allreduce", "allgather"]
"""How tokens get from attention to the experts and back; see engine.layers.dispatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """The place of one rank in its engine."""

    tp_size: Annotated[int, Ge(1)] = 1
    """Ranks that share every layer."""
    dp_size: Annotated[int, Ge(1)] = 1
    """Groups of tp_size ranks, with requests of their own."""
    ep_size: Annotated[int, Ge(1)] = 1
    """Ranks that share the experts: 1, or a divisor of tp_size * dp_size."""
    rank: Annotated[int, Ge(0)] = 0
    """This rank, of world_size."""
    moe_comm: MoEComm = "zero_redundancy"
    """With ep_size above 1."""
    sequence_parallel: bool = False
    """Split the rows of norms and residual over the tensor-parallel group in dense models too."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}, tp_size * dp_size is {self.world_size}")
        if self.world_size % self.ep_size:
            raise ValueError(
                f"ep_size is {self.ep_size}, must divide tp_size * dp_size = {self.world_size}"
            )

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return self.tp_size * self.dp_size

    @property
    def tp_rank(self) -> int:
        """This rank within its tensor-parallel group."""
        return self.rank % self.tp_size

    @property
    def dp_rank(self) -> int:
        """Which tensor-parallel group this rank is in."""
        return self.rank // self.tp_size

    @property
    def ep_rank(self) -> int:
        """This rank within its expert-parallel group."""
        return self.rank % self.ep_size
