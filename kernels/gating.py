"""How a router picks a token's experts, beyond plain top-k of a softmax."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Gating:
    """Group-limited top-k. In npu_moe_gating_top_k's words in brackets."""

    num_experts_per_tok: int
    """Experts of a token [k]."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """From router logits to scores [norm_type 0 or 1]."""
    num_groups: int = 1
    """Groups of neighbouring experts, equally large [group_count]."""
    num_groups_per_tok: int = 1
    """Only experts of the best groups may be chosen [k_group]."""
    group_scoring: Literal["max", "top2_sum"] = "max"
    """A group is as good as its best expert, or as its two best [group_select_mode 0 or 1]."""
    is_normalized: bool = False
    """Whether the weights of a token are divided by their sum, before the scaling factor."""
    scaling_factor: float = 1.0
    """Multiplies the weights [routed_scaling_factor]."""


def gating_topk(
    router_logits: Tensor, gating: Gating, correction_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The specification of `Ops.moe_gating_topk`.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.2.2; DeepSeek-V3 (arXiv 2412.19437), 2.1.2.
    """
    logits = router_logits.float()
    scores = logits.sigmoid() if gating.scoring == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if correction_bias is None else scores + correction_bias
    if gating.num_groups > 1:
        choice = _best_groups_only(choice, gating)
    topk_ids = choice.topk(gating.num_experts_per_tok, dim=-1).indices
    topk_weights = scores.gather(-1, topk_ids)
    if gating.is_normalized:
        topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
    return topk_weights * gating.scaling_factor, topk_ids


def _best_groups_only(choice: Tensor, gating: Gating) -> Tensor:
    grouped = choice.view(len(choice), gating.num_groups, -1)  # [T, groups, experts of a group]
    count = 1 if gating.group_scoring == "max" else 2
    group_scores = grouped.topk(count, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(gating.num_groups_per_tok, dim=-1).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(is_out[..., None], float("-inf")).flatten(-2)
