"""Which data-parallel rank of an engine takes a new request."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one rank has to do, with the new request: its shares of what it can."""

    num_requests: int
    max_num_requests: int
    num_tokens: int
    """To compute before their requests decode."""
    max_num_tokens: int
    """Of one step."""
    num_blocks: int
    """Held, and asked for by those that wait."""
    max_num_blocks: int

    @property
    def cost(self) -> float:
        """Steps until it decodes, and how full the batch and the KV cache are then."""
        return (
            self.num_tokens / self.max_num_tokens
            + self.num_requests / self.max_num_requests
            + self.num_blocks / self.max_num_blocks
        )


def least_loaded(loads: Sequence[Load]) -> int:
    """The rank that a new request should go to; the first of equals.

    A rank whose pool it would overfill comes after those that have room.
    """

    def order(rank: int) -> tuple[bool, float]:
        load = loads[rank]
        return load.num_blocks > load.max_num_blocks, load.cost

    return min(range(len(loads)), key=order)
