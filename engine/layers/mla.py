"""Multi-head latent attention over the paged cache of latents.

Letters: T tokens, H heads, R kv_lora_rank, Dn and Dr the parts of a head without and with position,
Dv the width of its values.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from engine.batch import KVBatch
from engine.config import MLAConfig, ModelConfig, Quantization
from engine.layers.attention import OnLayer
from engine.layers.layer import Shard, WeightedLayer
from engine.layers.linear import FusedLinear
from engine.layers.low_rank import AdapterRows, LatentAdditions, LatentDelta
from engine.layers.norm import RMSNorm
from engine.layers.plain import empty_weight
from engine.layers.rows import rows_of
from engine.parallel import Parallel
from engine.split import Span, split_evenly
from engine.stages import stage_of
from kernels.kv_cache import KVCache
from kernels.latent import LatentProlog, LatentWeights
from kernels.ops import Ops

# Of the norms inside the attention; no config has it.
_LATENT_EPS = 1e-6

Caches = tuple[KVCache, KVCache]
"""Latents and rope parts of one layer."""


class KVUpProjection(WeightedLayer):
    """kv_b_proj, taken apart: what makes keys of a latent, and what makes values.

    `w_uk` [H, Dn, R] and `w_uv` [H, R, Dv] are there once packed. They stay in float: attention in
    absorbed form multiplies the queries with them, not the latents.
    """

    def __init__(self, heads: Span, config: MLAConfig, *, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self._heads = heads
        self._nope = config.qk_nope_head_dim
        self._latent_size = config.kv_lora_rank
        self._rows = heads.scaled(config.qk_nope_head_dim + config.v_head_dim)
        self._weight: Tensor | None = empty_weight(len(self._rows), config.kv_lora_rank)
        self._w_uk: Tensor | None = None
        self._w_uv: Tensor | None = None
        self.additions: LatentAdditions | None = None
        """What adapters add; None: the model takes none."""

    @property
    def outputs(self) -> Span:
        """The rows of this rank's heads."""
        return self._rows

    @property
    def num_inputs(self) -> int:
        """Width of a latent."""
        return self._latent_size

    def additions_of(self, rows: AdapterRows) -> LatentAdditions:
        """Let adapters add to it, to these rows of a batch."""
        self.additions = LatentAdditions(rows, self._ops)
        return self.additions

    def low_rank(self, a: Tensor, b: Tensor) -> LatentDelta:
        """a: [rank, R]; b: [rows of this rank's heads, rank]."""
        by_head = b.view(len(self._heads), -1, b.shape[1])
        return LatentDelta(
            self._ops.linear(a, None),
            self._ops.linear(a.t().contiguous(), None),
            self._ops.parameter(by_head[:, : self._nope].contiguous()),
            self._ops.parameter(by_head[:, self._nope :].transpose(1, 2).contiguous()),
        )

    @property
    def w_uk(self) -> Tensor:
        """[H, Dn, R]."""
        assert self._w_uk is not None, "the weights are not loaded"
        return self._w_uk

    @property
    def w_uv(self) -> Tensor:
        """[H, R, Dv]."""
        assert self._w_uv is not None, "the weights are not loaded"
        return self._w_uv

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The matrix as checkpoints hold it."""
        assert self._weight is not None, "the weights are packed already"
        yield "kv_b_proj.weight", self._weight

    def shards(self) -> Mapping[str, Shard]:
        """The rows of this rank's heads."""
        is_split = len(self._rows) < self._rows.total
        return {"kv_b_proj.weight": Shard(0, self._rows)} if is_split else {}

    def pack(self, quantization: Quantization | None) -> None:
        """Take it apart."""
        assert self._weight is not None, "the weights are packed already"
        per_head = self._weight.view(len(self._heads), -1, self._weight.shape[1])
        self._w_uk = self._ops.parameter(per_head[:, : self._nope].contiguous())
        self._w_uv = self._ops.parameter(per_head[:, self._nope :].transpose(1, 2).contiguous())
        self._weight = None


class MLAttention(nn.Module):
    """Project to latents, write the cache, attend in absorbed or expanded form, project back.

    Heads are split over the ranks; every rank has all latents. Scattered rows are gathered after
    the projection to latents, where they are narrowest.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    def __init__(
        self, config: ModelConfig, layer_idx: int, *, ops: Ops, parallel: Parallel
    ) -> None:
        super().__init__()
        mla = config.mla
        assert mla is not None, "the model has no latent attention"
        size, bias = config.hidden_size, config.attention_bias
        self._ops = ops
        self._prolog: LatentProlog | None = None
        self._layer_idx = stage_of(config.num_layers, parallel.config).own_index(layer_idx)
        self._mla = mla
        heads = split_evenly("num_heads", config.num_heads, parallel.tp)
        q = heads.scaled(config.head_dim)
        self._rows = rows_of(parallel)
        latent_size = mla.kv_lora_rank + mla.qk_rope_head_dim
        self._head_dims = [mla.qk_nope_head_dim, mla.qk_rope_head_dim]
        self._latent_sizes = [mla.q_lora_rank or len(q), latent_size]
        if mla.q_lora_rank is None:
            self.q_proj = FusedLinear(size, {"q_proj": q}, bias=False, ops=ops)
            self.kv_a_proj = FusedLinear(
                size, {"kv_a_proj_with_mqa": latent_size}, bias=bias, ops=ops
            )
        else:
            self.a_proj = FusedLinear(
                size,
                {"q_a_proj": mla.q_lora_rank, "kv_a_proj_with_mqa": latent_size},
                bias=bias,
                ops=ops,
            )
            self.q_a_layernorm = RMSNorm(
                mla.q_lora_rank, _LATENT_EPS, name="q_a_layernorm", ops=ops
            )
            self.q_b_proj = FusedLinear(mla.q_lora_rank, {"q_b_proj": q}, bias=False, ops=ops)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, _LATENT_EPS, name="kv_a_layernorm", ops=ops)
        self.kv_b_proj = KVUpProjection(heads, mla, ops=ops)
        self.o_proj = FusedLinear(
            heads.scaled(mla.v_head_dim), {"o_proj": size}, bias=bias, ops=ops
        )

    def when_packed(self) -> None:
        """Let the backend take all that comes before attention as one, if it can."""
        if self._mla.q_lora_rank is None or self._rows.is_scattered:
            return  # NOTE: scattered rows are gathered in its middle, where they are narrowest
        a_proj, q_b_proj = self.a_proj.packed, self.q_b_proj.packed
        if a_proj is None or q_b_proj is None:
            return
        self._prolog = self._ops.latent_prolog(
            LatentWeights(
                a_proj=a_proj,
                q_b_proj=q_b_proj,
                q_norm=self.q_a_layernorm.weight,
                kv_norm=self.kv_a_layernorm.weight,
                w_uk=self.kv_b_proj.w_uk,
                eps=_LATENT_EPS,
            )
        )

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], kv: KVBatch, on_layer: OnLayer | None
    ) -> Tensor:
        """x: [T, hidden_size], normalised -> the same; rows as they are between blocks."""
        if self._prolog is not None and self._is_plain_decode(kv, len(x)):
            return self._decode(self._prolog, x, rotary, kv, on_layer)
        q, latent = self._project(x, len(kv.slot_mapping))
        q_nope, q_rope = torch.split(q, self._head_dims, dim=-1)
        q_rope = self._ops.interleave_rope(q_rope, *rotary)
        caches = self._ops.kv_rmsnorm_rope(
            latent,
            self.kv_a_layernorm.weight,
            *rotary,
            kv.k_caches[self._layer_idx],
            kv.v_caches[self._layer_idx],
            kv.slot_mapping,
            _LATENT_EPS,
        )
        kv.complete(*caches)
        if on_layer is not None:
            on_layer(self._layer_idx)
        attended = self._attend(q_nope, q_rope, caches, kv)
        return self._rows.reduce_from(self.o_proj, attended.flatten(1))

    def _is_plain_decode(self, kv: KVBatch, num_tokens: int) -> bool:
        has_additions = self.a_proj.has_additions or self.q_b_proj.has_additions
        return kv.num_decode_tokens == num_tokens and not has_additions

    def _decode(
        self,
        prolog: LatentProlog,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        kv: KVBatch,
        on_layer: OnLayer | None,
    ) -> Tensor:
        layer_idx = self._layer_idx
        k_cache, v_cache = kv.k_caches[layer_idx], kv.v_caches[layer_idx]
        q_latent, q_rope, *caches = prolog(x, *rotary, k_cache, v_cache, kv.slot_mapping)
        kv.complete(k_cache, v_cache)
        if on_layer is not None:
            on_layer(layer_idx)
        attended = self._attend_latents(q_latent, q_rope, (caches[0], caches[1]), kv)
        return self._rows.reduce_from(self.o_proj, attended.flatten(1))

    def _project(self, x: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """-> q [T, H, Dn + Dr]; latents with their rope parts, before the norm [T, R + Dr]."""
        if self._mla.q_lora_rank is None:
            x = self._rows.gather(x, num_tokens)
            q, latent = self.q_proj(x), self.kv_a_proj(x)
        else:
            q_latent, latent = torch.split(
                self._rows.gather(self.a_proj(x), num_tokens), self._latent_sizes, dim=-1
            )
            q = self.q_b_proj(self.q_a_layernorm(q_latent))
        return q.unflatten(-1, (-1, sum(self._head_dims))), latent

    def _attend(self, q_nope: Tensor, q_rope: Tensor, caches: Caches, kv: KVBatch) -> Tensor:
        """-> [T, H, Dv]. Sequences with few queries take the absorbed form, the others expand."""
        num_seqs, num_tokens = kv.num_decode_seqs, kv.num_decode_tokens
        additions = self.kv_b_proj.additions
        if additions is not None and additions.is_active:
            return self._adapted(q_nope, q_rope, caches, kv, additions)
        if num_tokens == len(q_nope):
            return self._absorbed(q_nope, q_rope, caches, kv)
        if num_tokens == 0:
            return self._expanded(q_nope, q_rope, caches, kv)
        decodes, prefills = kv.split(num_seqs, num_tokens)
        return torch.cat(
            [
                self._absorbed(q_nope[:num_tokens], q_rope[:num_tokens], caches, decodes),
                self._expanded(q_nope[num_tokens:], q_rope[num_tokens:], caches, prefills),
            ]
        )

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, caches: Caches, kv: KVBatch) -> Tensor:
        q_latent = self._ops.head_matmul(q_nope, self.kv_b_proj.w_uk)
        return self._attend_latents(q_latent, q_rope, caches, kv)

    def _attend_latents(
        self, q_latent: Tensor, q_rope: Tensor, caches: Caches, kv: KVBatch
    ) -> Tensor:
        attended = self._attended(q_latent, q_rope, caches, kv)
        return self._ops.head_matmul(attended, self.kv_b_proj.w_uv)

    def _adapted(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        caches: Caches,
        kv: KVBatch,
        additions: LatentAdditions,
    ) -> Tensor:
        """In absorbed form, whatever the number of queries: latents are the same for all rows."""
        q_latent = self._ops.head_matmul(q_nope, self.kv_b_proj.w_uk).contiguous()
        additions.add_to_queries_(q_nope, q_latent)
        attended = self._attended(q_latent, q_rope, caches, kv)
        out = self._ops.head_matmul(attended, self.kv_b_proj.w_uv).contiguous()
        additions.add_to_values_(attended, out)
        return out

    def _attended(self, q_latent: Tensor, q_rope: Tensor, caches: Caches, kv: KVBatch) -> Tensor:
        """-> [T, H, R]."""
        if (o_proj := self.o_proj.packed) is not None:
            self._ops.prefetch(o_proj, q_latent)
        return self._ops.mla_paged_attention(
            q_latent,
            q_rope,
            *caches,
            kv.block_table,
            kv.cu_seqlens_q,
            kv.context_lens,
            self._mla.softmax_scale,
            kv.max_seqlen_q,
        )

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, caches: Caches, kv: KVBatch) -> Tensor:
        return self._ops.mla_prefill_attention(
            q_nope,
            q_rope,
            self.kv_b_proj.w_uk,
            self.kv_b_proj.w_uv,
            *caches,
            kv.block_table,
            kv.cu_seqlens_q,
            kv.context_lens,
            self._mla.softmax_scale,
            kv.max_seqlen_q,
        )
