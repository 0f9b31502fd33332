"""What the ranks of an engine agree on before a forward pass, from the numbers of rows of all.

The leader knows these and sends its plan with the batches, so no rank has to ask another:

    halves      whether the step is computed in two, and where each rank cuts
    bucket      rows that every rank pads to where a collective wants equal sizes
    exchange    how rows get to experts of other ranks: all-to-all sends what is routed, once for
                each expert; gather sends every row to every rank, once, and sums what comes back.
                Rows are gathered where that moves far fewer of them: many experts a token, over few
                ranks, with batches of about the same size. See bench/bench_exchange.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.parallel_config import ParallelConfig

MIN_GAIN = 4
"""Rows by all-to-all for each gathered one, from which on gathering is faster."""


@dataclass(slots=True)
class StepPlan:
    """Of the forward pass under way; written by whoever commands it."""

    bucket: int = 0
    """Most rows of a data- or context-parallel rank; 0: nobody said, and ranks that need it ask
    each other.
    """
    gathers: bool = False
    """Whether rows are gathered on their way to experts, not sent by all-to-all."""
    wanted_rows: Tensor | None = None
    """[R] int32, with context parallelism: rows of the batch whose states somebody reads; None: of
    all. The others' are zeros.
    """
    cut: int = 0
    """Rows of this rank's first half, see engine.dual_batch; 0: the step is computed as one. All
    ranks divide a step, or none. The bucket is then that of a half.
    """
    is_even: bool = False
    """Whether all data-parallel ranks have equally many rows, padding included."""

    def become(self, other: "StepPlan") -> None:
        """Plan as the other does; wanted_rows stay."""
        self.bucket, self.gathers = other.bucket, other.gathers
        self.cut, self.is_even = other.cut, other.is_even

    def own_bucket(self, tp_size: int) -> int:
        """Most rows of a rank where each has its share of the rows; 0: unknown."""
        return -(-self.bucket // tp_size)


def plan_step(
    num_rows: Sequence[int],
    config: ParallelConfig,
    num_experts_per_tok: int,
    *,
    has_operators: bool = False,
) -> StepPlan:
    """num_rows: by data- or context-parallel rank, dummy rows included.

    num_experts_per_tok: 0 if dense.
    has_operators: the device has operators of its own in the place of all-to-all.
    """
    bucket = max(num_rows)
    plan = StepPlan(bucket, is_even=min(num_rows) == bucket)
    if config.ep_size == 1 or not num_experts_per_tok:
        return plan
    if config.moe_exchange != "auto":
        plan.gathers = config.moe_exchange == "gather"
        return plan
    if has_operators:
        return plan
    peers = config.ep_size - 1
    # What one rank sends, on average, and gets back.
    routed = sum(num_rows) / config.stage_size * num_experts_per_tok * peers / config.ep_size
    gathered = plan.own_bucket(config.tp_size) * peers
    plan.gathers = MIN_GAIN * gathered <= routed
    return plan
