"""Tokens on their way to experts on other ranks, and back.

    slots of the rows --> rows sorted by slot --sizes, then rows: all-to-all--> sorted by own slot
      --> experts --all-to-all--> weighted sum of each token's rows

The sizes are exchanged first, so exactly the rows that are routed travel: none is dropped, none is
padding.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.collectives import Group
from kernels.ops import Ops

Compute = Callable[[Tensor, Tensor], Tensor]
"""compute(rows [R, H] sorted by slot, sizes [slots of this rank]) -> [R, H]."""


class AllToAllDispatch:
    """Each row goes to the ranks that hold its experts; ranks may have any number of rows."""

    def __init__(self, group: Group, slots_per_rank: int, ops: Ops) -> None:
        self._group = group
        self._slots_per_rank = slots_per_rank
        self._ops = ops

    def __call__(self, x: Tensor, topk_weights: Tensor, slots: Tensor, compute: Compute) -> Tensor:
        """x: [T, H]; topk_weights, slots: [T, k] -> [T, H]: the weighted sum of the experts."""
        size, per_rank = self._group.size, self._slots_per_rank
        rows, row_index, sizes = self._ops.moe_init_routing(x, slots, size * per_rank)
        sizes = sizes.view(size, per_rank)  # rows that go to each slot
        ones = [1] * size
        received = self._group.all_to_all(sizes, ones, ones)  # rows that come for each own slot
        sent_counts, received_counts = sizes.sum(dim=1).tolist(), received.sum(dim=1).tolist()
        arrived = self._group.all_to_all(rows, sent_counts, received_counts)
        if per_rank == 1:  # sorted already
            out = compute(arrived, received.sum(dim=0))
        else:
            own_slots = torch.arange(per_rank).repeat(size).repeat_interleave(received.flatten())
            order = own_slots.argsort(stable=True)
            out = torch.empty_like(arrived)
            out[order] = compute(arrived[order], received.sum(dim=0))
        returned = self._group.all_to_all(out, received_counts, sent_counts)
        return self._ops.moe_finalize_routing(returned, row_index, topk_weights)


def compute_own(
    x: Tensor,
    topk_weights: Tensor,
    slots: Tensor,
    first_slot: int,
    num_slots: int,
    compute: Compute,
    ops: Ops,
) -> Tensor:
    """What the slots [first_slot, first_slot + num_slots) add to each row; zeros where nothing.

    x: [T, H]; topk_weights, slots: [T, k] -> [T, H].
    """
    own = (slots >= first_slot) & (slots < first_slot + num_slots)
    row_ids, choices = own.nonzero(as_tuple=True)
    out = torch.zeros_like(x)
    if not len(row_ids):
        return out
    own_slots = slots[row_ids, choices][:, None] - first_slot
    rows, row_index, sizes = ops.moe_init_routing(x[row_ids], own_slots, num_slots)
    weights = topk_weights[row_ids, choices][:, None]
    added = ops.moe_finalize_routing(compute(rows, sizes), row_index, weights)
    return out.index_add_(0, row_ids, added)
