"""Experts spread over NPUs: each rank hands its rows to the experts' ranks and gets sums back.

    x, ids --dispatch--> rows of this rank's experts --gate_up, swiglu, down--> --combine--> sums
    x -----shared gate_up, swiglu (beside dispatch)----> shared down (beside combine) ----> + sums

Dispatch returns as many rows as there could be; what lies past the counted ones is undefined, and
grouped products neither read nor write it. Experts on int8 activations get their rows in int8: half
of the bytes travel. The shared expert is whole on every rank, so it needs no communication and may
run on the side stream.

Source: Ascend/op-plugin, pages of npu_moe_distribute_dispatch_v2 and npu_moe_distribute_combine_v2.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.ascend.gated import NpuInt8Experts
from kernels.ascend.hccl import ExpertExchange
from kernels.ascend.streams import after, on_side_stream
from kernels.experts import GatedExperts, SharedExpert

_COUNTS = 1
_AS_THEY_ARE, _INT8_PER_ROW = 0, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroup:
    """An expert-parallel group as the operators see it; equal on all its ranks but for the rank."""

    communicator: str
    """HCCL's name of it. Nothing else may communicate through it."""
    rank: int
    sizes: ExpertExchange
    is_even: bool = True
    """Whether all ranks dispatch equally many rows in a step."""

    @property
    def algorithm(self) -> str:
        """comm_alg. On A2 a variable of HCCL's would choose, and the other one takes no mask."""
        return "fullmesh" if self.sizes.product == "A2" else ""

    def options(self, active: Tensor | None) -> dict[str, object]:
        """What dispatch and combine have to be told alike; active: [T] bool, see `dispatch`."""
        sizes, is_even = self.sizes, self.is_even or active is not None
        # In graphs of A2, tp has to name the same group; elsewhere it must not.
        names_tp = sizes.product == "A2" and torch.compiler.is_compiling()
        return {
            "group_tp": self.communicator if names_tp else "",
            "global_bs": 0 if is_even else sizes.max_tokens * sizes.ep_size,
            "comm_alg": self.algorithm,
            "x_active_mask": active,
        }


class Dispatched(NamedTuple):
    """What dispatch received, and what combine needs to send it back."""

    rows: Tensor
    """[A, H], grouped by local expert; int8 if so wanted."""
    scales: Tensor
    """[A] float32, of int8 rows."""
    group_sizes: Tensor
    """[local experts] int64: rows of each."""
    assist: Tensor
    receive_counts: Tensor
    tp_receive_counts: Tensor
    expand_scales: Tensor


def dispatch(
    x: Tensor,
    topk_ids: Tensor,
    group: ExpertGroup,
    *,
    active: Tensor | None = None,
    in_int8: bool = False,
) -> Dispatched:
    """Send each of x [T, H] to the ranks of its experts, rounded to int8 if they want it so.

    topk_ids: [T, k] int32, different ones in each row. active: [T] bool, true before false: rows
    to send; given on all ranks, with T the same, or on none.
    Raises: ValueError: shapes that the group was not checked for.
    """
    sizes = group.sizes
    if not 1 <= x.shape[0] <= sizes.max_tokens or x.shape[1] != sizes.hidden_size:
        raise ValueError(
            f"dispatch: x is {list(x.shape)}, the group was checked for [1 to {sizes.max_tokens}, "
            f"{sizes.hidden_size}]"
        )
    if topk_ids.shape != (x.shape[0], sizes.num_experts_per_tok) or topk_ids.dtype != torch.int32:
        raise ValueError(
            f"dispatch: topk_ids is {list(topk_ids.shape)} {topk_ids.dtype}, must be "
            f"[{x.shape[0]}, {sizes.num_experts_per_tok}] int32"
        )
    if active is not None and (active.shape != x.shape[:1] or active.dtype != torch.bool):
        raise ValueError(
            f"dispatch: active is {list(active.shape)} {active.dtype}, must be [{x.shape[0]}] bool"
        )
    rows, scales, assist, counts, received, tp_received, expand_scales = (
        torch.ops.npu.npu_moe_distribute_dispatch_v2(
            x,
            topk_ids,
            group.communicator,
            sizes.ep_size,
            group.rank,
            sizes.num_experts,
            quant_mode=_INT8_PER_ROW if in_int8 else _AS_THEY_ARE,
            expert_token_nums_type=_COUNTS,
            **group.options(active),
        )
    )
    return Dispatched(rows, scales, counts, assist, received, tp_received, expand_scales)


def combine(
    rows: Tensor,
    dispatched: Dispatched,
    topk_ids: Tensor,
    topk_weights: Tensor,
    group: ExpertGroup,
    active: Tensor | None = None,
) -> Tensor:
    """Bring the experts' rows back: sum over k of weight * row, [T, H].

    topk_weights: [T, k] float32. active: as dispatch was given it; other rows are undefined.
    """
    sizes = group.sizes
    out: Tensor = torch.ops.npu.npu_moe_distribute_combine_v2(
        rows,
        topk_ids,
        dispatched.assist,
        dispatched.receive_counts,
        topk_weights,
        group.communicator,
        sizes.ep_size,
        group.rank,
        sizes.num_experts,
        tp_send_counts=dispatched.tp_receive_counts,
        **group.options(active),
    )
    return out


class NpuExpertDispatch:
    """Implements `kernels.experts.ExpertDispatch`."""

    def __init__(self, group: ExpertGroup, *, is_multi_stream: bool) -> None:
        """is_multi_stream: in a graph, the shared expert runs beside the communication."""
        self.max_tokens = group.sizes.max_tokens
        self._group = group
        self._is_multi_stream = is_multi_stream

    def __call__(
        self,
        x: Tensor,
        topk_weights: Tensor,
        expert_ids: Tensor,
        experts: GatedExperts,
        shared: SharedExpert | None,
        active: Tensor | None = None,
    ) -> Tensor:
        """See `ExpertDispatch`. Raises: ValueError: shapes that the group was not checked for."""
        is_beside = self._is_multi_stream
        topk_ids, topk_weights = expert_ids.int(), topk_weights.float()
        hidden = None
        if shared is not None:
            with on_side_stream(is_beside):
                hidden = shared.up(x)
        in_int8 = isinstance(experts, NpuInt8Experts)
        dispatched = dispatch(x, topk_ids, self._group, active=active, in_int8=in_int8)
        if isinstance(experts, NpuInt8Experts):
            rows = experts.of_int8(dispatched.rows, dispatched.scales, dispatched.group_sizes)
        else:
            rows = experts(dispatched.rows, dispatched.group_sizes)
        shared_out = None
        if shared is not None and hidden is not None:
            with on_side_stream(is_beside):
                # NOTE: not before the routed experts are through with the matrix unit; combine
                # leaves it idle.
                shared_out = shared.down(after(hidden, rows, is_beside))
        out = combine(rows, dispatched, topk_ids, topk_weights, self._group, active)
        return out if shared_out is None else out + shared_out
