"""For peers that look at the CPU itself: they are told that it has no AVX-512. See services.py."""

import torch


def _no() -> bool:
    return False


for name in ("avx512", "avx512_bf16", "vnni", "amx_tile", "amx_fp16"):
    setattr(torch.cpu, f"_is_{name}_supported", _no)
