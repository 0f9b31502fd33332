"""Group-limited top-k in plain PyTorch: the specification of `Ops.moe_gating_topk`."""

import torch
from torch import Tensor

from kernels.gating import Gating


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
