"""KV caches without a transport: tensors of a layout."""

import torch

from kernels.kv_cache import KVCache, QuantizedCache
from kvtransfer.layout import KVLayout
from kvtransfer.registration import TORCH_DTYPES


def poisoned_caches(layout: KVLayout, num_blocks: int) -> tuple[list[KVCache], list[KVCache]]:
    """(k_caches, v_caches) whose rows are NaN until written: who reads others gets no number."""

    def values(shape: tuple[int, ...]) -> KVCache:
        if layout.dtype != "int8":
            return torch.full(shape, torch.nan, dtype=TORCH_DTYPES[layout.dtype])
        scale = torch.full((*shape[:3], 1), torch.nan)
        return QuantizedCache(torch.full(shape, 127, dtype=torch.int8), scale)

    first, second = layout.shapes(num_blocks)
    layers = range(layout.num_layers)
    return [values(first) for _ in layers], [values(second) for _ in layers]
