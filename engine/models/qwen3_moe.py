"""Qwen3-MoE: Qwen3 whose MLP is, in most layers, a mixture of experts.

Source: arXiv 2505.09388.
"""

from engine.config import ModelConfig
from engine.layers.moe import MoE
from engine.models.layer import DecoderLayer
from engine.models.qwen3 import qwen3_attention, qwen3_layer
from engine.parallel import Parallel
from kernels.ops import Ops


def qwen3_moe_layer(
    config: ModelConfig, layer_idx: int, ops: Ops, parallel: Parallel
) -> DecoderLayer:
    """A sparse layer, or a dense one where the config asks for it."""
    if config.moe is None or layer_idx not in config.moe.layers:
        return qwen3_layer(config, layer_idx, ops, parallel)
    return DecoderLayer(
        config,
        ops,
        self_attn=qwen3_attention(config, layer_idx, ops, parallel),
        mlp=MoE(config.hidden_size, config.moe, ops=ops, parallel=parallel),
    )
