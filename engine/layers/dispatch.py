"""Tokens on their way to experts on other ranks, and back.

    all-to-all   slots of the rows --> rows sorted by slot --sizes, then rows: all-to-all-->
                 sorted by own slot --> experts --all-to-all--> weighted sum of each token's rows
    exchange     the device's own operators do all of it, in shapes that are the same in every step

All-to-all exchanges the sizes first and reads them on the host, so exactly the rows that are routed
travel: none is dropped, none is padding. An exchange takes a bounded number of rows, which decode
steps keep to, and may be in a graph.
"""

from typing import Protocol

import torch
from torch import Tensor

from engine.collectives import Group
from engine.parallel import Parallel
from engine.side_thread import SideThread
from engine.step_plan import StepPlan
from kernels.experts import ExchangeSizes, ExpertDispatch, GatedExperts, SharedExpert
from kernels.ops import Ops


class Dispatch(Protocol):
    """Rows that no other rank has, through the experts of all ranks."""

    def __call__(
        self,
        x: Tensor,
        topk_weights: Tensor,
        slots: Tensor,
        experts: GatedExperts,
        shared: SharedExpert | None,
        active: Tensor | None = None,
    ) -> Tensor:
        """x: [T, H]; topk_weights, slots: [T, k] -> [T, H]: the weighted sum of the experts, and
        the shared one. Every rank of the group calls it.

        active: see engine.layers.moe.active_rows; what is not active may be left out.
        """
        ...


class AllToAllDispatch:
    """Each row goes to the ranks that hold its experts; ranks may have any number of rows."""

    def __init__(
        self, group: Group, slots_per_rank: int, ops: Ops, side: SideThread | None = None
    ) -> None:
        """side: computes the shared expert meanwhile; None: it comes last."""
        self._side = side
        self._group = group
        self._slots_per_rank = slots_per_rank
        self._ops = ops

    def __call__(
        self,
        x: Tensor,
        topk_weights: Tensor,
        slots: Tensor,
        experts: GatedExperts,
        shared: SharedExpert | None,
        active: Tensor | None = None,
    ) -> Tensor:
        """See `Dispatch`."""
        size, per_rank = self._group.size, self._slots_per_rank
        beside = None
        if shared is not None and self._side is not None:
            beside = self._side.start(lambda: shared.down(shared.up(x)))
        rows, row_index, sizes = self._ops.moe_init_routing(x, slots, size * per_rank)
        sizes = sizes.view(size, per_rank)  # rows that go to each slot
        ones = [1] * size
        received = self._group.all_to_all(sizes, ones, ones)  # rows that come for each own slot
        sent_counts, received_counts = sizes.sum(dim=1).tolist(), received.sum(dim=1).tolist()
        arrived = self._group.all_to_all(rows, sent_counts, received_counts)
        if per_rank == 1:  # sorted already
            out = experts(arrived, received.sum(dim=0))
        else:
            slot = torch.arange(per_rank, device=x.device).repeat(size)
            order = slot.repeat_interleave(received.flatten()).argsort(stable=True)
            out = torch.empty_like(arrived)
            out[order] = experts(arrived[order], received.sum(dim=0))
        returned = self._group.all_to_all(out, received_counts, sent_counts)
        routed = self._ops.moe_finalize_routing(returned, row_index, topk_weights)
        if beside is not None:
            return routed + beside.result()
        return routed if shared is None else routed + shared.down(shared.up(x))


class ExchangeDispatch:
    """By the device's operators, and by all-to-all where there are more rows than they take.

    Whichever it is, all ranks of a group have to take the same: see `Parallel.exchange_rows`.
    Halves of a step go by all-to-all, beside which the other one is computed.
    """

    def __init__(self, exchange: ExpertDispatch, otherwise: Dispatch, step: StepPlan) -> None:
        self._exchange = exchange
        self._otherwise = otherwise
        self._step = step

    def __call__(
        self,
        x: Tensor,
        topk_weights: Tensor,
        slots: Tensor,
        experts: GatedExperts,
        shared: SharedExpert | None,
        active: Tensor | None = None,
    ) -> Tensor:
        """See `Dispatch`."""
        few = x.shape[0] <= self._exchange.max_tokens and not self._step.cut
        dispatch = self._exchange if few else self._otherwise
        return dispatch(x, topk_weights, slots, experts, shared, active)


def select_dispatch(
    parallel: Parallel, ops: Ops, *, slots_per_rank: int, num_experts_per_tok: int, hidden_size: int
) -> Dispatch:
    """The exchange where the device has operators for it, else all-to-all.

    Raises: ValueError: the device has them, and they do not take these sizes; says which.
    """
    all_to_all = AllToAllDispatch(parallel.ep, slots_per_rank, ops, parallel.side)
    if parallel.exchange is None or not parallel.exchange_rows:
        return all_to_all
    sizes = ExchangeSizes(
        num_experts=slots_per_rank * parallel.ep.size,
        num_experts_per_tok=num_experts_per_tok,
        hidden_size=hidden_size,
        max_tokens=parallel.exchange_rows,
        is_even=parallel.config.has_even_rows,
    )
    try:
        exchange = ops.expert_dispatch(parallel.exchange, sizes)
    except ValueError as error:
        limits = "max_num_seqs" if sizes.is_even else "max_num_batched_tokens and max_num_seqs"
        raise ValueError(
            f"experts over {parallel.ep.size} ranks: {error} ({limits} of a worker "
            "say how many tokens a step has)"
        ) from error
    return all_to_all if exchange is None else ExchangeDispatch(exchange, all_to_all, parallel.step)


def compute_own(
    x: Tensor,
    topk_weights: Tensor,
    slots: Tensor,
    first_slot: int,
    num_slots: int,
    experts: GatedExperts,
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
    added = ops.moe_finalize_routing(experts(rows, sizes), row_index, weights)
    return out.index_add_(0, row_ids, added)
