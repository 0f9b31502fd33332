"""The layer that every decoder is made of, and how a family makes its own."""

from collections.abc import Callable

from torch import Tensor, nn

from engine.batch import KVBatch
from engine.config import ModelConfig
from engine.layers.attention import Attention, OnLayer
from engine.layers.mla import MLAttention
from engine.layers.mlp import GatedMLP
from engine.layers.moe import MoE
from engine.layers.norm import RMSNorm
from engine.parallel import Parallel
from kernels.ops import Ops


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with the sum carried as `residual`."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        *,
        self_attn: Attention | MLAttention,
        mlp: GatedMLP | MoE,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, name="input_layernorm", ops=ops)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(size, eps, name="post_attention_layernorm", ops=ops)
        self.mlp = mlp
        self._is_sparse = isinstance(mlp, MoE)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        kv: KVBatch,
        on_layer: OnLayer | None,
    ) -> tuple[Tensor, Tensor]:
        """x, residual: [T, hidden_size]; x is what the last layer adds. -> the same of this one.

        Rows are as engine.layers.rows says: all of them, or this rank's.
        """
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, rotary, kv, on_layer)
        x, residual = self.post_attention_layernorm.add(x, residual)
        x = self.mlp(x, kv.active) if self._is_sparse else self.mlp(x)
        return x, residual


BuildLayer = Callable[[ModelConfig, int, Ops, Parallel], DecoderLayer]
"""A family: makes this rank's part of layer i of a model of its config."""
