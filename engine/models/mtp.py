"""Layers after the last, which predict tokens further ahead: the model's own source of drafts.

    depth 0: h_i, the model's final state at token i, and token i + 1 --> state --> token i + 2
    depth 1: that state, and token i + 2                              --> state --> token i + 3

Their keys and values are layers of the cache as any other. The last one used again on its own state
and draft predicts further tokens, with less success.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2.
"""

import torch
from torch import Tensor, nn

from engine.batch import KVBatch
from engine.config import ModelConfig
from engine.layers.attention import OnLayer
from engine.layers.linear import FusedLinear
from engine.layers.norm import RMSNorm
from engine.layers.rows import Rows
from engine.models.layer import DecoderLayer
from kernels.ops import Ops


class MTPLayer(nn.Module):
    """A decoder layer with an input and an output of its own; embedding and head are the model's.

    Weights are named as DeepSeek names them, `model.layers.<num_layers>.*`.
    """

    def __init__(self, config: ModelConfig, ops: Ops, layer: DecoderLayer, rows: Rows) -> None:
        super().__init__()
        self._rows = rows
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(size, eps, name="enorm", ops=ops)
        self.hnorm = RMSNorm(size, eps, name="hnorm", ops=ops)
        self.eh_proj = FusedLinear(2 * size, {"eh_proj": size}, bias=False, ops=ops)
        # NOTE: in a list, where torch does not see it: checkpoints name its parts as ours.
        self._layer = [layer]
        for name, part in layer.named_children():
            self.add_module(name, part)
        self.norm = RMSNorm(size, eps, name="shared_head.norm", ops=ops)

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv: KVBatch,
        on_layer: OnLayer | None,
    ) -> Tensor:
        """embedded: of the tokens ahead, rows as between blocks; hidden: [T, hidden_size].

        -> states [T, hidden_size], for the head, for the next depth and for this layer again.
        """
        own = self._rows.own(hidden)
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(own)], dim=-1))
        x, residual = self._layer[0](x, None, rotary, kv, on_layer)
        normed, _ = self.norm.add(x, residual)
        return self._rows.gather(normed, len(hidden))
