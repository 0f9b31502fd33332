"""Paged caches in int8, made of float ones whose unused rows are NaN."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.kv_cache import QuantizedCache, quantize_rows
from tests.kernels.paged import PagedBatch, PagedMLABatch


def quantized(cache: Tensor) -> QuantizedCache:
    """Unused rows keep a NaN: their scale."""
    unused = cache.isnan().any(dim=-1, keepdim=True)
    values, scale = quantize_rows(cache.nan_to_num())
    return QuantizedCache(
        values.masked_fill(unused, 127).contiguous(), scale.masked_fill(unused, torch.nan)
    )


def poisoned(num_blocks: int, num_heads: int, block_size: int, width: int) -> QuantizedCache:
    return quantized(torch.full((num_blocks, num_heads, block_size, width), torch.nan))


def with_int8_cache(batch: PagedBatch) -> PagedBatch:
    assert isinstance(batch.k_cache, Tensor)
    assert isinstance(batch.v_cache, Tensor)
    return replace(batch, k_cache=quantized(batch.k_cache), v_cache=quantized(batch.v_cache))


def with_int8_latents(batch: PagedMLABatch) -> PagedMLABatch:
    assert isinstance(batch.latent_cache, Tensor)
    assert isinstance(batch.rope_cache, Tensor)
    return replace(
        batch,
        latent_cache=quantized(batch.latent_cache),
        rope_cache=quantized(batch.rope_cache),
    )
