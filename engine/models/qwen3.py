"""Qwen3: every head of q and k is normalised before it is rotated.

Source: arXiv 2505.09388.
"""

from engine.config import ModelConfig
from engine.layers.attention import Attention
from engine.layers.mlp import GatedMLP
from engine.models.layer import DecoderLayer
from engine.parallel import Parallel
from kernels.ops import Ops


def qwen3_attention(config: ModelConfig, layer_idx: int, ops: Ops, parallel: Parallel) -> Attention:
    """The attention that the dense and the sparse models share."""
    bias = config.attention_bias
    return Attention(
        config, layer_idx, ops=ops, parallel=parallel, qkv_bias=bias, o_bias=bias, qk_norm=True
    )


def qwen3_layer(config: ModelConfig, layer_idx: int, ops: Ops, parallel: Parallel) -> DecoderLayer:
    """The dense layer."""
    return DecoderLayer(
        config,
        ops,
        self_attn=qwen3_attention(config, layer_idx, ops, parallel),
        mlp=GatedMLP(
            config.hidden_size, config.intermediate_size, bias=False, ops=ops, parallel=parallel
        ),
    )
