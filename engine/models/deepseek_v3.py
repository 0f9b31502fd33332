"""DeepSeek-V2, V3 and R1: latent attention, and after the first layers shared and routed experts.

V2 differs from V3 by its configuration alone: softmax scores and no correction bias.

Source: arXiv 2405.04434 (V2), 2412.19437 (V3), 2501.12948 (R1).
"""

from engine.config import ModelConfig
from engine.layers.mla import MLAttention
from engine.layers.mlp import GatedMLP
from engine.layers.moe import MoE
from engine.models.layer import DecoderLayer
from engine.parallel import Parallel
from kernels.ops import Ops


def deepseek_layer(
    config: ModelConfig, layer_idx: int, ops: Ops, parallel: Parallel
) -> DecoderLayer:
    """A sparse layer, or one of the dense ones."""
    size = config.hidden_size
    mlp: GatedMLP | MoE
    if config.moe is not None and layer_idx in config.moe.layers:
        mlp = MoE(size, config.moe, ops=ops, parallel=parallel)
    else:
        mlp = GatedMLP(
            size, config.intermediate_size, bias=config.mlp_bias, ops=ops, parallel=parallel
        )
    return DecoderLayer(
        config, ops, self_attn=MLAttention(config, layer_idx, ops=ops, parallel=parallel), mlp=mlp
    )
