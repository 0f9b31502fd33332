"""How a router picks a token's experts, beyond plain top-k of a softmax."""

from dataclasses import dataclass
from typing import Literal


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
