"""Qwen2 and Qwen2.5: Llama with biases on q, k and v alone.

Source: arXiv 2407.10671, 2412.15115.
"""

from engine.config import ModelConfig
from engine.layers.attention import Attention
from engine.layers.mlp import GatedMLP
from engine.models.layer import DecoderLayer
from engine.parallel import Parallel
from kernels.ops import Ops


def qwen2_layer(config: ModelConfig, layer_idx: int, ops: Ops, parallel: Parallel) -> DecoderLayer:
    """The biases belong to the family; no config names them."""
    return DecoderLayer(
        config,
        ops,
        self_attn=Attention(
            config, layer_idx, ops=ops, parallel=parallel, qkv_bias=True, o_bias=False
        ),
        mlp=GatedMLP(
            config.hidden_size, config.intermediate_size, bias=False, ops=ops, parallel=parallel
        ),
    )
