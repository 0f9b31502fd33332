"""Weights of experts on their way from rank to rank, in one all-to-all.

Weights travel as they are packed, so what computes with them is the same bits on every rank.
"""

from typing import Protocol

import torch
from torch import Tensor

from engine.collectives import Group
from engine.expert_placement import ExpertPlacement, moves
from kernels.packed import PackedWeight, from_row, to_row


class PackedExperts(Protocol):
    """The experts that this rank holds."""

    def packed(self, slot: int) -> list[PackedWeight]:
        """The weights in a slot of this rank, as they lie in memory."""
        ...


def move_experts(
    experts: PackedExperts, old: ExpertPlacement, new: ExpertPlacement, group: Group
) -> int:
    """Overwrite this rank's slots with the experts of `new`; every rank of the group calls it.

    Nothing is overwritten before all ranks have what they need. Beyond the weights there exist, for
    a moment, those that this rank sends and receives. Returns how many changed their rank.
    """
    size, rank = new.slots_per_rank, group.rank
    plan = moves(old, new)
    crossing = [m for m in plan if m.source // size != m.target // size]
    inside = [m for m in plan if m.source // size == m.target // size == rank]
    # NOTE: by target, as every rank sorts them: so rows arrive in the order of `arriving`.
    leaving = [m for m in crossing if m.source // size == rank]
    arriving = sorted(
        (m for m in crossing if m.target // size == rank),
        key=lambda m: (m.source // size, m.target),
    )
    copies = {m.target: to_row(experts.packed(m.source % size)) for m in inside}
    if crossing:
        sent, received = [0] * group.size, [0] * group.size
        for m in leaving:
            sent[m.target // size] += 1
        for m in arriving:
            received[m.source // size] += 1
        rows = group.all_to_all(_rows(experts, [m.source % size for m in leaving]), sent, received)
        copies |= {m.target: row for m, row in zip(arriving, rows, strict=True)}
    for target, row in copies.items():
        from_row(row, experts.packed(target % size))
    return len(crossing)


def can_move(experts: PackedExperts, num_slots: int, group: Group) -> bool:
    """Whether all slots of all ranks are of one form; every rank of the group calls it."""
    kinds = {repr([w.kind for w in experts.packed(slot)]) for slot in range(num_slots)}
    (own, *others) = kinds
    padded = own.encode()[:_KIND_BYTES].ljust(_KIND_BYTES)
    found = group.all_gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8)[None])
    is_one = torch.tensor([[not others]], dtype=torch.uint8)
    return bool((found == found[0]).all()) and bool(group.all_gather(is_one).all())


_KIND_BYTES = 512


def _rows(experts: PackedExperts, slots: list[int]) -> Tensor:
    if slots:
        return torch.stack([to_row(experts.packed(slot)) for slot in slots])
    width = sum(w.num_bytes for w in experts.packed(0))
    return torch.empty(0, width, dtype=torch.uint8)
