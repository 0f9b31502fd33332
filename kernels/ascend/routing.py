"""The router's choice, and the way of rows to the experts and back, on one rank.

Source: torch_npu 2.13.0, _op_plugin_docs.py: npu_moe_gating_top_k, npu_moe_gating_top_k_softmax,
npu_moe_init_routing_v2, npu_moe_finalize_routing.
"""

import torch
from torch import Tensor

from kernels.gating import Gating

_MAX_EXPERTS = 2048
_MAX_K = 1024
_COUNTS = 1
_GATHER_INDEX = 0
_ROW_MAJOR_NO_DROP = 2


def gating_topk_softmax(router_logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `Ops.moe_gating_topk_softmax`; ids are int32. Raises: ValueError: k is out of range."""
    num_experts = router_logits.shape[1]
    if not 0 < k <= min(num_experts, _MAX_K):
        raise ValueError(f"gating: k is {k}, the NPU takes 1 to {min(num_experts, _MAX_K)}")
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(router_logits.float(), None, k)
    return weights, ids


def gating_topk(
    router_logits: Tensor, gating: Gating, correction_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `Ops.moe_gating_topk`; ids are int32.

    Raises: ValueError: the operator cannot do it; says which limit.
    """
    check_gating(gating, router_logits.shape[1])
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
        router_logits.float(),
        gating.num_experts_per_tok,
        bias=None if correction_bias is None else correction_bias.float(),
        k_group=gating.num_groups_per_tok,
        group_count=gating.num_groups,
        group_select_mode=0 if gating.group_scoring == "max" else 1,
        norm_type=1 if gating.scoring == "sigmoid" else 0,
        routed_scaling_factor=gating.scaling_factor,
    )
    if gating.scoring == "softmax" and gating.is_normalized:
        # The operator normalises the weights of sigmoid scores alone.
        weights = weights / weights.sum(dim=-1, keepdim=True) * gating.scaling_factor
    return weights, ids


def check_gating(gating: Gating, num_experts: int) -> None:
    """Raise ValueError, naming the limit, where npu_moe_gating_top_k cannot do it."""
    groups, k = gating.num_groups, gating.num_experts_per_tok
    if num_experts % groups or (groups > 1 and num_experts // groups <= 2):
        raise ValueError(
            f"gating: {num_experts} experts in {groups} groups, the NPU takes equal groups of more "
            "than 2"
        )
    padded = -(-num_experts // groups // 32) * 32 * groups
    if padded > _MAX_EXPERTS:
        raise ValueError(f"gating: {padded} experts with padding, the NPU takes {_MAX_EXPERTS}")
    if not 1 <= k <= num_experts // groups * gating.num_groups_per_tok:
        raise ValueError(
            f"gating: k is {k}, the {gating.num_groups_per_tok} best groups have "
            f"{num_experts // groups * gating.num_groups_per_tok} experts"
        )
    if gating.scoring == "sigmoid" and not gating.is_normalized:
        raise ValueError("gating: the NPU always normalises the weights of sigmoid scores")


def init_routing(x: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `Ops.moe_init_routing`; row_index [T * k] int32 is where each choice's row went."""
    if topk_ids.dtype != torch.int32:
        topk_ids = topk_ids.int()
    rows, row_index, group_sizes, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        topk_ids,
        active_num=topk_ids.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=_COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts],
        row_idx_type=_GATHER_INDEX,
    )
    return rows, row_index, group_sizes


def finalize_routing(rows: Tensor, row_index: Tensor, topk_weights: Tensor) -> Tensor:
    """See `Ops.moe_finalize_routing`."""
    out: Tensor = torch.ops.npu.npu_moe_finalize_routing(
        rows, None, None, None, topk_weights.to(rows.dtype), row_index, None, _ROW_MAJOR_NO_DROP
    )
    return out
