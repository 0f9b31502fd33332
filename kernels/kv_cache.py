"""The paged cache of one layer's keys or values, in floats or in int8 with a scale per row.

A row is one token of one head. Quantised, it is `values * scale`, symmetric:

    scale = max |x| / 127      values = round(x 127 / max |x|), half to even

so it depends on its own floats alone: the same however a prompt was cut into chunks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

MAX_INT8 = 127.0
LEAST_MAX = 1e-30
"""Rows whose largest number is below it become zeros."""


class QuantizedCache(NamedTuple):
    """A cache in int8. A tuple, so that compiled graphs take it as they take two tensors."""

    values: Tensor
    """[num_blocks, num_kv_heads, block_size, width] int8."""
    scale: Tensor
    """[num_blocks, num_kv_heads, block_size, 1] float32."""

    @property
    def shape(self) -> torch.Size:
        """Of the values."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Where both are."""
        return self.values.device


KVCache = Tensor | QuantizedCache
"""[num_blocks, num_kv_heads, block_size, width]; a tensor holds floats."""


def tensors_of(cache: KVCache) -> tuple[Tensor, Tensor | None]:
    """The values, and the scales if it has any."""
    return cache if isinstance(cache, QuantizedCache) else (cache, None)


def floats_of(cache: KVCache) -> Tensor:
    """A cache that has to be in floats.

    Raises: ValueError: it is in int8.
    """
    if isinstance(cache, QuantizedCache):
        raise ValueError("the KV cache is in int8, and this operator takes floats alone")
    return cache


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows: [..., width] -> values [..., width] int8, scale [..., 1] float32."""
    wide = rows.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    values = (wide * (MAX_INT8 / largest.clamp_min(LEAST_MAX))).round_()
    return values.to(torch.int8), largest / MAX_INT8


def write_rows(cache: KVCache, block_ids: Tensor, offsets: Tensor, rows: Tensor) -> None:
    """Write row i, [num_kv_heads, width], into slot offsets[i] of block block_ids[i]."""
    if isinstance(cache, QuantizedCache):
        values, scale = quantize_rows(rows)
        cache.values[block_ids, :, offsets] = values
        cache.scale[block_ids, :, offsets] = scale
    else:
        cache[block_ids, :, offsets] = rows.to(cache.dtype)


def read_blocks(cache: KVCache, block_ids: Tensor) -> Tensor:
    """block_ids: [n] -> [n, num_kv_heads, block_size, width] in floats."""
    if isinstance(cache, QuantizedCache):
        return cache.values[block_ids].float() * cache.scale[block_ids]
    return cache[block_ids]
