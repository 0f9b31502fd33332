"""Mixtral: Llama whose MLP is a mixture of experts in every layer.

Source: arXiv 2401.04088.
"""

from engine.config import ModelConfig
from engine.layers.attention import Attention
from engine.layers.moe import MoE
from engine.models.layer import DecoderLayer
from engine.parallel import Parallel
from kernels.ops import Ops


def mixtral_layer(
    config: ModelConfig, layer_idx: int, ops: Ops, parallel: Parallel
) -> DecoderLayer:
    """A sparse layer."""
    assert config.moe is not None, "every layer has experts"
    return DecoderLayer(
        config,
        ops,
        self_attn=Attention(
            config, layer_idx, ops=ops, parallel=parallel, qkv_bias=False, o_bias=False
        ),
        mlp=MoE(config.hidden_size, config.moe, ops=ops, parallel=parallel),
    )
