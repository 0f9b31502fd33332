"""Multi-head latent attention's rotation, cache write and expansion on the NPU.

Source: torch_npu 2.13.0, op_plugin/meta/_meta_registrations.py and the operators' pages in
Ascend/op-plugin: npu_interleave_rope, npu_kv_rmsnorm_rope_cache, npu_gather_pa_kv_cache,
npu_transpose_batchmatmul.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ascend.streams import on_side_stream

_ROPE_WIDTH = 64
_LATENT_WIDTH = 512


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `Ops.interleave_rope`; cos, sin: [T, 64]. Raises: ValueError: another width."""
    if x.shape[-1] != _ROPE_WIDTH:
        raise ValueError(f"interleave_rope: {x.shape[-1]} wide, the NPU takes {_ROPE_WIDTH}")
    # [B, N, S, D] with a token as B and one position each.
    out: Tensor = torch.ops.npu.npu_interleave_rope(
        x.unsqueeze(2).contiguous(), cos[:, None, None], sin[:, None, None]
    )
    return out.squeeze(2)


def kv_rmsnorm_rope(
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    slots: Tensor,
    eps: float,
    *,
    is_beside: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `Ops.kv_rmsnorm_rope`; slots: [T] int64. One operator normalises, rotates and writes.

    is_beside: on the side stream, since it is vector work while the queries are projected.

    In a graph what it returns must be read, not the caches: nothing else says that it comes first.
    Raises: ValueError: other widths.
    """
    widths = (latent_cache.shape[-1], rope_cache.shape[-1])
    if widths != (_LATENT_WIDTH, _ROPE_WIDTH):
        raise ValueError(
            f"kv_rmsnorm_rope: latent and rope part are {widths[0]} and {widths[1]} wide, the NPU "
            f"takes {_LATENT_WIDTH} and {_ROPE_WIDTH}"
        )
    kv = kv[:, None, None].contiguous()
    cos, sin = cos[:, None, None], sin[:, None, None]
    rope_cache, latent_cache = token_major(rope_cache), token_major(latent_cache)
    with on_side_stream(is_beside):
        rope_out, latent_out, _, _ = torch.ops.npu.npu_kv_rmsnorm_rope_cache(
            kv, weight, cos, sin, slots, rope_cache, latent_cache, epsilon=eps, cache_mode="PA"
        )
    return head_major(latent_out), head_major(rope_out)


def token_major(cache: Tensor) -> Tensor:
    """[num_blocks, 1, block_size, W] -> [num_blocks, block_size, 1, W], which is the same memory.

    A graph is given its caches in this form: an operator that writes through a view of its input
    may write to a copy.
    """
    if cache.shape[2] == 1:
        return cache
    return cache.view(cache.shape[0], cache.shape[2], 1, cache.shape[3])


def head_major(cache: Tensor) -> Tensor:
    """Inverse of token_major."""
    if cache.shape[1] == 1:
        return cache
    return cache.view(cache.shape[0], 1, cache.shape[1], cache.shape[3])


def head_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """See `Ops.head_matmul`."""
    out: Tensor = torch.ops.npu.npu_transpose_batchmatmul(
        x, weight, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )
    return out


def expand(
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of all contexts, end to end.

    context_lens: [N] on the host, their sum is C; w_uk: [H, Dn, R]; w_uv: [H, R, Dv]. -> k_nope
    [C, H, Dn], k_rope [C, H, P], v [C, H, Dv].
    """
    num_heads, num_keys = w_uk.shape[0], int(context_lens.sum())
    latent = latent_cache.new_empty(num_keys, 1, latent_cache.shape[-1])
    rope = rope_cache.new_empty(num_keys, 1, rope_cache.shape[-1])
    torch.ops.npu.npu_gather_pa_kv_cache(
        token_major(latent_cache),
        token_major(rope_cache),
        block_table,
        context_lens.to(block_table.device),
        latent,
        rope,
    )
    rows = latent.flatten(1)
    k_nope = functional.linear(rows, w_uk.flatten(0, 1))
    v = functional.linear(rows, w_uv.transpose(1, 2).flatten(0, 1))
    return (
        k_nope.view(num_keys, num_heads, -1),
        rope.expand(-1, num_heads, -1),
        v.view(num_keys, num_heads, -1),
    )
