"""Experts spread over NPUs: each rank hands its rows to the experts' ranks and gets sums back.

    x, ids --dispatch--> rows of this rank's experts --gate_up, swiglu, down--> --combine--> sums
    x -----shared gate_up, swiglu (beside dispatch)----> shared down (beside combine) ----> + sums

Dispatch returns as many rows as there could be; what lies past the counted ones is undefined, and
grouped products neither read nor write it. The shared expert is whole on every rank, so it needs no
communication and may run on the side stream.

Source: Ascend/op-plugin, pages of npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ascend.hccl import ExpertExchange
from kernels.ascend.streams import after, on_side_stream

_COUNTS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroup:
    """An expert-parallel group as the operators see it; equal on all its ranks but for the rank."""

    communicator: str
    """HCCL's name of it. Nothing else may communicate through it."""
    rank: int
    sizes: ExpertExchange
    algorithm: str = ""
    """comm_alg; empty leaves the choice to the product."""


class Dispatched(NamedTuple):
    """What dispatch received, and what combine needs to send it back."""

    rows: Tensor
    """[A, H], grouped by local expert."""
    group_sizes: Tensor
    """[local experts] int64: rows of each."""
    assist: Tensor
    receive_counts: Tensor
    tp_receive_counts: Tensor
    expand_scales: Tensor


class SharedExpert(NamedTuple):
    """The MLP that computes every token, in two halves."""

    up: Callable[[Tensor], Tensor]
    """x [T, H] -> swiglu(gate_up(x)) [T, I]."""
    down: Callable[[Tensor], Tensor]
    """[T, I] -> [T, H]."""


def dispatch(
    x: Tensor, topk_ids: Tensor, group: ExpertGroup, is_active: Tensor | None = None
) -> Dispatched:
    """Send each of x [T, H] to the ranks of its experts.

    topk_ids: [T, k] int32; is_active: [T] bool, a run of True and then padding.
    Raises: ValueError: shapes that the group was not checked for.
    """
    sizes = group.sizes
    if x.shape[0] > sizes.max_tokens or x.shape[1] != sizes.hidden_size:
        raise ValueError(
            f"dispatch: x is {list(x.shape)}, the group was checked for at most "
            f"[{sizes.max_tokens}, {sizes.hidden_size}]"
        )
    if topk_ids.shape != (x.shape[0], sizes.num_experts_per_tok) or topk_ids.dtype != torch.int32:
        raise ValueError(
            f"dispatch: topk_ids is {list(topk_ids.shape)} {topk_ids.dtype}, must be "
            f"[{x.shape[0]}, {sizes.num_experts_per_tok}] int32"
        )
    rows, _, assist, counts, received, tp_received, scales = (
        torch.ops.npu.npu_moe_distribute_dispatch_v2(
            x,
            topk_ids,
            group.communicator,
            sizes.ep_size,
            group.rank,
            sizes.num_experts,
            x_active_mask=is_active,
            expert_token_nums_type=_COUNTS,
            comm_alg=group.algorithm,
        )
    )
    return Dispatched(rows, counts, assist, received, tp_received, scales)


def combine(
    rows: Tensor,
    dispatched: Dispatched,
    topk_ids: Tensor,
    topk_weights: Tensor,
    group: ExpertGroup,
    *,
    is_active: Tensor | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """Bring the experts' rows back: sum over k of weight * row (+ shared), [T, H].

    topk_weights: [T, k] float32.
    """
    sizes = group.sizes
    out: Tensor = torch.ops.npu.npu_moe_distribute_combine_v2(
        rows,
        topk_ids,
        dispatched.assist,
        dispatched.receive_counts,
        topk_weights.float(),
        group.communicator,
        sizes.ep_size,
        group.rank,
        sizes.num_experts,
        tp_send_counts=dispatched.tp_receive_counts,
        x_active_mask=is_active,
        shared_expert_x=shared,
        comm_alg=group.algorithm,
    )
    return out


def run_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    group: ExpertGroup,
    experts: Callable[[Tensor, Tensor], Tensor],
    *,
    shared: SharedExpert | None = None,
    is_active: Tensor | None = None,
    is_multi_stream: bool = False,
) -> Tensor:
    """The routed experts, and the shared one beside their communication. x: [T, H] -> [T, H].

    experts(rows [A, H], group_sizes) -> [A, H]: this rank's own, one after the other by size.
    """
    with on_side_stream(is_multi_stream and shared is not None):
        hidden = None if shared is None else shared.up(x)
    dispatched = dispatch(x, topk_ids, group, is_active)
    rows = experts(dispatched.rows, dispatched.group_sizes)
    shared_out = None
    if shared is not None and hidden is not None:
        with on_side_stream(is_multi_stream):
            # NOTE: not before the routed experts are through with the matrix unit; combine leaves
            # it idle.
            shared_out = shared.down(after(hidden, rows, is_multi_stream))
    out = combine(rows, dispatched, topk_ids, topk_weights, group, is_active=is_active)
    return out if shared_out is None else out + shared_out
