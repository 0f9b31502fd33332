"""The paged KV cache that a model needs."""

import torch

from engine.config import ModelConfig
from engine.parallel import Parallel, split_kv_heads
from engine.stages import stage_of
from kernels.kv_cache import KVCache, QuantizedCache
from kvtransfer.layout import KVLayout
from kvtransfer.registration import TORCH_DTYPES

SCALE_DTYPE = "float32"
"""Of the scales of an int8 cache: what Ascend's attention takes too."""


def kv_layout(
    config: ModelConfig,
    block_size: int,
    parallel: Parallel | None = None,
    dtype: str = "float32",
) -> KVLayout:
    """Of one rank; latent attention has one latent per token, on every rank. int8 has scales.

    Raises: ValueError: the KV heads cannot be split over the ranks.
    """
    parallel, mla = parallel or Parallel(), config.mla
    stage = stage_of(config.num_layers, parallel.config)
    # Latents are not split, whatever the number of heads.
    num_heads = (
        config.num_kv_heads if mla else len(split_kv_heads(config.num_kv_heads, parallel.tp))
    )
    return KVLayout(
        dtype=dtype,
        num_layers=len(stage.layers) + config.num_kv_layers - config.num_layers,
        num_kv_heads=num_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        tp_rank=parallel.tp.rank,
        tp_size=parallel.tp.size,
        total_num_kv_heads=config.num_kv_heads,
        kv_lora_rank=mla.kv_lora_rank if mla else 0,
        rope_dim=mla.qk_rope_head_dim if mla else 0,
        scale_dtype=SCALE_DTYPE if dtype == "int8" else "",
        first_layer=stage.layers.start,
        total_num_layers=config.num_kv_layers,
        pp_rank=parallel.config.pp_rank,
        pp_size=parallel.config.pp_size,
    )


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
