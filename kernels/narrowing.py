"""Narrowing a distribution to its largest values, in plain PyTorch: the specification of the op."""

import torch
from torch import Tensor


def top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """See `Ops.top_k_top_p`."""
    ordered, places = logits.sort(dim=-1, stable=True)
    if top_k is not None:
        kth = ordered.gather(1, ordered.shape[1] - top_k[:, None].long())
        ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    if top_p is not None:
        reached = ordered.softmax(dim=-1).cumsum(dim=-1)
        outside = reached <= 1 - top_p[:, None]
        outside[:, -1] = False
        ordered = ordered.masked_fill(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(1, places, ordered)
