"""From experts to the slots that hold them, as tensors, for rows on their way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.expert_placement import ExpertPlacement


class SlotTable:
    """From experts to slots, for tensors; an expert's slots take turns by row.

    Its tensors keep their shape and place, whatever the placement.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        *,
        device: torch.device | None = None,
        is_moved: bool = True,
    ) -> None:
        """is_moved: whether `set` may be called while serving, when a graph knows the table."""
        num_redundant = placement.num_slots - placement.num_experts
        most = min(1 + num_redundant, placement.num_ranks)
        shape = (placement.num_experts, most)
        self._slots = torch.zeros(shape, dtype=torch.int64, device=device)
        self._num = torch.ones(placement.num_experts, dtype=torch.int64, device=device)
        self._is_plain = most == 1
        self._is_moved = is_moved
        self._is_identity = False
        self.set(placement)

    def set(self, placement: ExpertPlacement) -> None:
        """Follow another placement, of as many slots."""
        slots = placement.slots_of()
        self._slots.copy_(torch.tensor([_cycle(s, self._slots.shape[1]) for s in slots]))
        self._num.copy_(torch.tensor([len(s) for s in slots]))
        in_order = placement.experts == tuple(range(placement.num_experts))
        self._is_identity = in_order and not self._is_moved

    def __call__(self, topk_ids: Tensor, first_turn: int) -> Tensor:
        """topk_ids: [T, k], experts -> slots of the same shape.

        first_turn: which turn row 0 has; ranks that start with different ones spread a load that
        is the same on all.
        """
        if self._is_identity:
            return topk_ids
        if self._is_plain:
            return self._slots[:, 0][topk_ids]
        stop = first_turn + len(topk_ids)
        turns = torch.arange(first_turn, stop, device=topk_ids.device)[:, None]
        return self._slots[topk_ids, turns % self._num[topk_ids]]


def _cycle(slots: Sequence[int], length: int) -> list[int]:
    return [slots[i % len(slots)] for i in range(length)]
