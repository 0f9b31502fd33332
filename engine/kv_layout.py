"""The paged KV cache that a model needs."""

from engine.config import ModelConfig
from kvtransfer.layout import KVLayout


def kv_layout(config: ModelConfig, block_size: int) -> KVLayout:
    """Of the whole model in float32; latent attention has one latent per token."""
    mla = config.mla
    return KVLayout(
        dtype="float32",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        total_num_kv_heads=config.num_kv_heads,
        kv_lora_rank=mla.kv_lora_rank if mla else 0,
        rope_dim=mla.qk_rope_head_dim if mla else 0,
    )
