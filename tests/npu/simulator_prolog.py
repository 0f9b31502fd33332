"""What the NPU's one operator before latent attention computes; see tests/npu/simulator.py."""

from typing import Any

import torch
from torch import Tensor

from tests.npu.simulation import demand, kernel


def _norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gamma


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours; comes out as all first ones, then all second ones."""
    halves = torch.cat([x[..., 0::2], x[..., 1::2]], -1)
    turned = torch.cat([-x[..., 1::2], x[..., 0::2]], -1)
    return halves * cos + turned * sin


@kernel("npu_mla_prolog_v2")
def mla_prolog_v2(
    token_x: Tensor,
    weight_dq: Tensor,
    weight_uq_qr: Tensor,
    weight_uk: Tensor,
    weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor,
    rmsnorm_gamma_ckv: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    cache_index: Tensor,
    kv_cache: Tensor,
    kr_cache: Tensor,
    *,
    rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5,
    cache_mode: str = "PA_BSND",
    **unused: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_heads, width = weight_uk.shape[:2]
    demand(not any(value is not None for value in unused.values()), "nothing is quantised")
    demand(cache_mode == "PA_BSND" and kv_cache.shape[1] in (16, 128), "plain pages of 16 or 128")
    demand(token_x.dim() == 2 and token_x.shape[1] == 7168, "x is [T, 7168]")
    demand(weight_dq.shape == (7168, 1536), "weight_dq is [7168, 1536]")
    demand(weight_dkv_kr.shape == (7168, 576), "weight_dkv_kr is [7168, 576]")
    demand(weight_uq_qr.shape == (1536, num_heads * 192), "weight_uq_qr is [1536, N * 192]")
    demand((width, weight_uk.shape[2]) == (128, 512), "weight_uk is [N, 128, 512]")
    demand(num_heads in (1, 2, 4, 8, 16, 32, 64, 128), "so many heads")
    demand(cache_index.dtype == torch.int64 and cache_index.shape == token_x.shape[:1], "index")
    demand(kv_cache.shape[2:] == (1, 512) and kr_cache.shape[2:] == (1, 64), "caches")
    num_slots = kv_cache.shape[0] * kv_cache.shape[1]
    demand(bool(((cache_index >= 0) & (cache_index < num_slots)).all()), "no place out of bounds")
    q = _norm(token_x @ weight_dq, rmsnorm_gamma_cq, rmsnorm_epsilon_cq) @ weight_uq_qr
    q = q.view(-1, num_heads, width + 64)
    query = torch.einsum("tnd,ndr->tnr", q[..., :width], weight_uk)
    query_rope = _rotate(q[..., width:], rope_cos[:, None], rope_sin[:, None])
    latent, rope = (token_x @ weight_dkv_kr).split([512, 64], -1)
    block, offset = cache_index // kv_cache.shape[1], cache_index % kv_cache.shape[1]
    kv_cache[block, offset, 0] = _norm(latent, rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv)
    kr_cache[block, offset, 0] = _rotate(rope, rope_cos, rope_sin)
    return query, query_rope, kv_cache, kr_cache, torch.full((1,), torch.nan)
