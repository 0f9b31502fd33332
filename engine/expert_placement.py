"""Which rank of an expert-parallel group holds which experts.

Every rank has the same number of slots; slot s is on rank s // slots_per_rank. A slot holds one
expert; an expert may have several slots, on different ranks, which share its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The expert of every slot."""

    experts: tuple[int, ...]
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        if len(self.experts) % self.num_ranks:
            raise ValueError(f"{len(self.experts)} slots, not a multiple of {self.num_ranks} ranks")
        if missing := sorted(set(range(self.num_experts)) - set(self.experts)):
            raise ValueError(f"experts {missing} have no slot")
        if unknown := sorted(set(self.experts) - set(range(self.num_experts))):
            raise ValueError(f"experts {unknown} are in slots, the model has {self.num_experts}")
        for rank in range(self.num_ranks):
            held = self.of_rank(rank)
            if len(set(held)) < len(held):
                raise ValueError(f"rank {rank} holds an expert twice: {list(held)}")

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> "ExpertPlacement":
        """Each expert once, in order.

        Raises: ValueError: they cannot be dealt out evenly.
        """
        if num_experts % num_ranks:
            raise ValueError(f"num_experts is {num_experts}, not a multiple of ep_size {num_ranks}")
        return cls(tuple(range(num_experts)), num_experts, num_ranks)

    @property
    def slots_per_rank(self) -> int:
        """Experts that a rank holds."""
        return len(self.experts) // self.num_ranks

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Experts of a rank, by slot."""
        size = self.slots_per_rank
        return self.experts[rank * size : (rank + 1) * size]

    def slots_of(self) -> list[list[int]]:
        """Slots of every expert, in order."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            slots[expert].append(slot)
        return slots


class SlotTable:
    """From experts to slots, for tensors; an expert's slots take turns by row."""

    def __init__(self, placement: ExpertPlacement) -> None:
        slots = placement.slots_of()
        most = max(map(len, slots))
        self._slots = torch.tensor([_cycle(s, most) for s in slots])  # [num_experts, most]
        self._num = torch.tensor([len(s) for s in slots])
        self._is_plain = most == 1

    def __call__(self, topk_ids: Tensor, first_turn: int) -> Tensor:
        """topk_ids: [T, k], experts -> slots of the same shape.

        first_turn: which turn row 0 has; ranks that start with different ones spread a load that
        is the same on all.
        """
        if self._is_plain:
            return self._slots[:, 0][topk_ids]
        turns = torch.arange(first_turn, first_turn + len(topk_ids))[:, None]
        return self._slots[topk_ids, turns % self._num[topk_ids]]


def _cycle(slots: Sequence[int], length: int) -> list[int]:
    return [slots[i % len(slots)] for i in range(length)]
