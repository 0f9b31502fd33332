"""The paged KV cache that a model needs."""

from engine.config import ModelConfig
from engine.parallel import Parallel, split_kv_heads
from kvtransfer.layout import KVLayout


def kv_layout(
    config: ModelConfig,
    block_size: int,
    parallel: Parallel | None = None,
    dtype: str = "float32",
) -> KVLayout:
    """Of one rank; latent attention has one latent per token, on every rank.

    Raises: ValueError: the KV heads cannot be split over the ranks.
    """
    parallel, mla = parallel or Parallel(), config.mla
    # Latents are not split, whatever the number of heads.
    num_heads = (
        config.num_kv_heads if mla else len(split_kv_heads(config.num_kv_heads, parallel.tp))
    )
    return KVLayout(
        dtype=dtype,
        num_layers=config.num_kv_layers,
        num_kv_heads=num_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        tp_rank=parallel.tp.rank,
        tp_size=parallel.tp.size,
        total_num_kv_heads=config.num_kv_heads,
        kv_lora_rank=mla.kv_lora_rank if mla else 0,
        rope_dim=mla.qk_rope_head_dim if mla else 0,
    )
