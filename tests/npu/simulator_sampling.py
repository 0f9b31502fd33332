"""What the NPU's sampling operator computes; see tests/npu/simulator.py."""

import torch
from torch import Tensor

from tests.npu.simulation import demand, kernel


@kernel("npu_top_k_top_p")
def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Row by row, step by step as its page has it."""
    demand(logits.dim() == 2 and not (p is None and k is None), "rows, and p or k")
    demand(p is None or (p.dtype == logits.dtype and p.shape == logits.shape[:1]), "p is [B]")
    demand(p is None or bool(((p >= 0) & (p <= 1)).all()), "p is from 0 to 1")
    demand(k is None or (k.dtype == torch.int32 and k.shape == logits.shape[:1]), "k is [B] int32")
    most = min(1024, logits.shape[1])
    demand(k is None or bool(((k >= 1) & (k <= most)).all()), "k is from 1 to 1024")
    out = torch.empty_like(logits)
    for row, values in enumerate(logits):
        kept, indices = values.sort(stable=True)
        if k is not None:
            kept = torch.where(kept < kept[-int(k[row])], -torch.inf, kept)
        if p is not None:
            drop = kept.softmax(-1).cumsum(-1) <= 1 - p[row]
            drop[-1] = False
            kept = torch.where(drop, -torch.inf, kept)
        out[row, indices] = kept
    return out
