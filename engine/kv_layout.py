"""The paged KV cache that a model needs. Needs no torch."""

from dataclasses import replace

from engine.config import ModelConfig
from engine.parallel_config import ParallelConfig
from engine.split import Rank, split_kv_heads
from engine.stages import stage_of
from kvtransfer.layout import KVLayout

SCALE_DTYPE = "float32"
"""Of the scales of an int8 cache: what Ascend's attention takes too."""


def kv_layout(
    config: ModelConfig,
    block_size: int,
    parallel: ParallelConfig | None = None,
    dtype: str = "float32",
) -> KVLayout:
    """Of one rank; latent attention has one latent per token, on every rank. int8 has scales.

    Raises: ValueError: the KV heads cannot be split over the ranks.
    """
    parallel, mla = parallel or ParallelConfig(), config.mla
    stage = stage_of(config.num_layers, parallel)
    place = Rank(parallel.tp_rank, parallel.tp_size)
    # Latents are not split, whatever the number of heads.
    num_heads = config.num_kv_heads if mla else len(split_kv_heads(config.num_kv_heads, place))
    return KVLayout(
        dtype=dtype,
        num_layers=len(stage.layers) + config.num_kv_layers - config.num_layers,
        num_kv_heads=num_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        tp_rank=parallel.tp_rank,
        tp_size=parallel.tp_size,
        total_num_kv_heads=config.num_kv_heads,
        kv_lora_rank=mla.kv_lora_rank if mla else 0,
        rope_dim=mla.qk_rope_head_dim if mla else 0,
        scale_dtype=SCALE_DTYPE if dtype == "int8" else "",
        first_layer=stage.layers.start,
        total_num_layers=config.num_kv_layers,
        pp_rank=parallel.pp_rank,
        pp_size=parallel.pp_size,
    )


def max_block_bytes(
    config: ModelConfig, block_size: int, parallel: ParallelConfig, dtype: str = "float32"
) -> int:
    """What a block takes on a rank of the stage with most layers: as many blocks fit on any.

    Raises: ValueError: see kv_layout.
    """
    layout = kv_layout(config, block_size, parallel, dtype)
    stage = stage_of(config.num_layers, parallel)
    num_layers = layout.num_layers + stage.max_layers - len(stage.layers)
    return replace(layout, num_layers=num_layers).block_bytes_all_layers
