"""Llama: grouped-query attention and a gated MLP.

Source: arXiv 2302.13971, 2307.09288, 2407.21783.
"""

from engine.config import ModelConfig
from engine.layers.attention import Attention
from engine.layers.mlp import GatedMLP
from engine.models.layer import DecoderLayer
from engine.parallel import Parallel
from kernels.ops import Ops


def llama_layer(config: ModelConfig, layer_idx: int, ops: Ops, parallel: Parallel) -> DecoderLayer:
    """Biases where the config asks for them; Llama's own have none."""
    bias = config.attention_bias
    return DecoderLayer(
        config,
        ops,
        self_attn=Attention(
            config, layer_idx, ops=ops, parallel=parallel, qkv_bias=bias, o_bias=bias
        ),
        mlp=GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            ops=ops,
            parallel=parallel,
        ),
    )
