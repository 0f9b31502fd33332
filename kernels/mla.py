"""Multi-head latent attention in plain PyTorch: the specification of the MLA ops.

H: heads, R: kv_lora_rank, P: qk_rope_head_dim, Dn: qk_nope_head_dim, Dv: v_head_dim.

    c = latent [R], r = rope [P], one of each per token, shared by all heads and kept in the cache
    k_h = [w_uk_h c | r]      v_h = w_uv_h^T c      (expanded)
    q_h k_h = (q_nope_h w_uk_h) c + q_rope_h r      (absorbed: no key is ever expanded)

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.kv_cache import KVCache, read_blocks, write_rows

_QUERY_ROWS = 256  # queries whose scores exist at once


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `Ops.interleave_rope`."""
    first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


def kv_rmsnorm_rope(
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    latent_cache: KVCache,
    rope_cache: KVCache,
    slot_mapping: Tensor,
    eps: float,
) -> None:
    """See `Ops.kv_rmsnorm_rope`."""
    rank = latent_cache.shape[-1]
    latent, rope = kv[:, :rank], kv[:, rank:]
    wide = latent.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    rotated = interleave_rope(rope[:, None], cos, sin)[:, 0]
    block_size = latent_cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    block_ids, offsets = slots // block_size, slots % block_size
    write_rows(latent_cache, block_ids, offsets, normed[kept, None])
    write_rows(rope_cache, block_ids, offsets, rotated[kept, None])


def head_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """See `Ops.head_matmul`."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def paged_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: KVCache,
    rope_cache: KVCache,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """See `Ops.mla_paged_attention`."""
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    found = sequences(latent_cache, rope_cache, block_table, cu_seqlens_q, context_lens)
    for rows, latent, rope in found:
        q = scale * torch.cat([q_latent[rows], q_rope[rows]], dim=-1).float()
        keys = torch.cat([latent, rope], dim=-1)[None]
        out[rows] = _causal_attention(q, keys, latent[None])
    return out


def prefill_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    latent_cache: KVCache,
    rope_cache: KVCache,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """See `Ops.mla_prefill_attention`."""
    out = q_nope.new_empty(*q_nope.shape[:2], w_uv.shape[2])
    found = sequences(latent_cache, rope_cache, block_table, cu_seqlens_q, context_lens)
    for rows, latent, rope in found:
        q = scale * torch.cat([q_nope[rows], q_rope[rows]], dim=-1).float()
        out[rows] = _causal_attention(q, *expand(latent, rope, w_uk, w_uv))
    return out


def expand(latent: Tensor, rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """latent: [C, R]; rope: [C, P] -> keys [H, C, Dn + P], values [H, C, Dv], float32."""
    k_nope = latent @ w_uk.float().transpose(1, 2)
    keys = torch.cat([k_nope, rope.expand(len(k_nope), -1, -1)], dim=-1)
    return keys, latent @ w_uv.float()


def sequences(
    latent_cache: KVCache,
    rope_cache: KVCache,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The rows of each sequence that has any, its latents [C, R] and ropes [C, P] in float32."""
    block_size = latent_cache.shape[2]
    starts = cu_seqlens_q.tolist()
    for seq, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        if rows.start == rows.stop:
            continue
        block_ids = block_table[seq, : -(-context_len // block_size)].long()
        yield (
            rows,
            read_blocks(latent_cache, block_ids).flatten(0, 2)[:context_len].float(),
            read_blocks(rope_cache, block_ids).flatten(0, 2)[:context_len].float(),
        )


def _causal_attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q: [S, H, D], scaled; keys, values: [H or 1, C, ...], the last S the queries' own."""
    q_len, context_len = q.shape[0], keys.shape[1]
    parts = []
    for start in range(0, q_len, _QUERY_ROWS):
        part = q[start : start + _QUERY_ROWS]
        first_limit = context_len - q_len + start
        scores = part.transpose(0, 1) @ keys.transpose(1, 2)  # [H, S, C]
        last_key = torch.arange(first_limit, first_limit + len(part), device=q.device)[:, None]
        hidden = torch.arange(context_len, device=q.device)[None, :] > last_key
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        parts.append((weights @ values).transpose(0, 1))
    return torch.cat(parts)
