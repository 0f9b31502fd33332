"""Narrowing logits by top-k and top-p where they are.

Source: torch_npu 2.13.0, _op_plugin_docs.py, npu_top_k_top_p.
"""

import torch
from torch import Tensor

MAX_TOP_K = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """See `Ops.top_k_top_p`. Raises: ValueError: shapes and dtypes that the operator refuses.

    That top_k is at most MAX_TOP_K the caller has to see to: it is on the device.
    """
    if logits.dim() != 2 or logits.dtype not in _DTYPES:
        raise ValueError(f"top_k_top_p: logits are {list(logits.shape)} {logits.dtype}")
    if top_k is None and top_p is None:
        raise ValueError("top_k_top_p: both are None, the operator takes one at least")
    for name, values, dtype in (("top_k", top_k, torch.int32), ("top_p", top_p, logits.dtype)):
        if values is not None and (values.shape != logits.shape[:1] or values.dtype != dtype):
            raise ValueError(
                f"top_k_top_p: {name} is {list(values.shape)} {values.dtype}, must be "
                f"{list(logits.shape[:1])} {dtype}"
            )
    out: Tensor = torch.ops.npu.npu_top_k_top_p(logits, top_p, top_k)
    return out
