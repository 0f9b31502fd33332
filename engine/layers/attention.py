"""Grouped-query attention over the paged KV cache."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from engine.batch import KVBatch
from engine.config import ModelConfig
from engine.layers.linear import FusedLinear
from engine.layers.norm import RMSNorm
from engine.layers.rows import rows_of
from engine.parallel import Parallel
from engine.split import split_evenly, split_kv_heads
from engine.stages import stage_of
from kernels.ops import Ops

OnLayer = Callable[[int], None]
"""Called with layer i of this rank as soon as this step's keys and values are in its cache."""


class Attention(nn.Module):
    """Project, rotate, write the KV, attend, project back; heads are split over the ranks.

    Source: GQA (arXiv 2305.13245); paging as in PagedAttention (arXiv 2309.06180).
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_idx: int,
        *,
        ops: Ops,
        parallel: Parallel,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        head_dim, eps = config.head_dim, config.rms_norm_eps
        heads = split_evenly("num_heads", config.num_heads, parallel.tp)
        kv_heads = split_kv_heads(config.num_kv_heads, parallel.tp)
        q, kv = heads.scaled(head_dim), kv_heads.scaled(head_dim)
        self._rows = rows_of(parallel)
        self._ops = ops
        self._layer_idx = stage_of(config.num_layers, parallel.config).own_index(layer_idx)
        self._head_dim = head_dim
        self._sizes = [len(q), len(kv), len(kv)]
        self._scale = head_dim**-0.5
        self._window = config.window(layer_idx)
        self.qkv_proj = FusedLinear(
            config.hidden_size,
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            bias=qkv_bias,
            ops=ops,
        )
        self.o_proj = FusedLinear(q, {"o_proj": config.hidden_size}, bias=o_bias, ops=ops)
        self.q_norm = RMSNorm(head_dim, eps, name="q_norm", ops=ops) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, name="k_norm", ops=ops) if qk_norm else None

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], kv: KVBatch, on_layer: OnLayer | None
    ) -> Tensor:
        """x: [T, hidden_size], normalised -> the same; rows as they are between blocks."""
        layer_idx = self._layer_idx
        k_cache, v_cache = kv.k_caches[layer_idx], kv.v_caches[layer_idx]
        qkv: Tensor = self._rows.gather_into(self.qkv_proj, x, len(kv.slot_mapping))
        parts: Sequence[Tensor] = torch.split(qkv, self._sizes, dim=-1)
        # each [T, heads, D], a view into the fused output
        q, k, v = (part.view(len(part), -1, self._head_dim) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = self._ops.rotary_kv_write(q, k, v, *rotary, k_cache, v_cache, kv.slot_mapping)
        kv.complete(k_cache, v_cache)
        if on_layer is not None:
            on_layer(layer_idx)
        if (o_proj := self.o_proj.packed) is not None:
            self._ops.prefetch(o_proj, q)
        attended = self._ops.paged_attention(
            q,
            k_cache,
            v_cache,
            kv.block_table,
            kv.cu_seqlens_q,
            kv.context_lens,
            self._scale,
            kv.max_seqlen_q,
            self._window,
        )
        # [T, heads, D] -> [T, hidden_size]
        return self._rows.reduce_from(self.o_proj, attended.flatten(1))
