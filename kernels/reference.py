"""The specification of every op in plain PyTorch: obviously right, on any device, not fast."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels import mla
from kernels.device_queue import ThreadQueue, Wait, nothing_to_wait_for
from kernels.drawing import argmax, draw
from kernels.experts import ExchangeGroup, ExchangeSizes, ExpertsByParts, GroupedProduct
from kernels.gating import Gating
from kernels.kv_cache import KVCache, read_blocks, write_rows
from kernels.latent import LatentWeights
from kernels.narrowing import top_k_top_p
from kernels.packed import PackedWeight
from kernels.quantized import QuantizedRows, whole
from kernels.routing import gating_topk


class ReferenceLinear:
    """y = x W^T + b on the weight as given."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in_features] -> [T, out_features]."""
        return functional.linear(x, self._weight, self._bias)

    def packed(self) -> PackedWeight:
        """See `kernels.ops.Linear.packed`."""
        return PackedWeight.of(self._weight, self._bias)

    def rows(self, row_ids: Tensor) -> Tensor:
        """row_ids: [T] -> [T, in_features]: rows of W."""
        return self._weight[row_ids.long()]


class ReferenceQuantizedLinear:
    """y = x W^T + b on a weight that is dequantised for every product."""

    def __init__(self, weight: QuantizedRows, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = whole(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in_features] -> [T, out_features]."""
        return functional.linear(x, self._weight.dequantize().to(x.dtype), self._bias)

    def packed(self) -> PackedWeight:
        """See `kernels.ops.Linear.packed`."""
        weight = self._weight
        form = (weight.group_size, weight.num_bits)
        return PackedWeight.of(weight.values, weight.scale, weight.offset, self._bias, form=form)

    def rows(self, row_ids: Tensor) -> Tensor:
        """row_ids: [T] -> [T, in_features]: rows of W, dequantised."""
        return self._weight.rows(row_ids.long()).dequantize()


class _GroupLinear(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...

    def packed(self) -> PackedWeight: ...


class LinearPerGroup:
    """y = x W[g]^T, a group with rows at a time. Implements `kernels.ops.GroupedLinear`."""

    def __init__(self, linears: Sequence[_GroupLinear], shape: torch.Size) -> None:
        self.num_groups, self.out_features, self.in_features = shape
        self._linears = linears

    def __call__(self, x: Tensor, group_sizes: Tensor) -> Tensor:
        """x: [R, in_features], sorted by group -> [R, out_features]."""
        out = x.new_empty(x.shape[0], self.out_features)
        for group, rows in group_rows(group_sizes, self.num_groups, x.shape[0]):
            out[rows] = self._linears[group](x[rows])
        return out

    def packed(self, group: int) -> PackedWeight:
        """See `kernels.ops.GroupedLinear.packed`."""
        return self._linears[group].packed()


def group_rows(group_sizes: Tensor, num_groups: int, num_rows: int) -> Iterator[tuple[int, slice]]:
    """Every group that has rows, and which they are.

    Raises: ValueError: the sizes do not fit the rows or the groups.
    """
    sizes = group_sizes.tolist()
    if len(sizes) != num_groups or sum(sizes) != num_rows or min(sizes) < 0:
        raise ValueError(
            f"{len(sizes)} group sizes with sum {sum(sizes)} for {num_rows} rows, "
            f"{num_groups} groups"
        )
    start = 0
    for group, size in enumerate(sizes):
        if size:
            yield group, slice(start, start + size)
        start += size


class ReferenceOps:
    """Implements `kernels.ops.Ops`."""

    name = "reference"
    num_spare_blocks = 0
    device = torch.device("cpu")
    cache_dtype = "float32"
    collectives = "gloo"
    samples_on_device = False
    runs_ahead = False
    max_top_k = 2**31 - 1

    def input_bits(self, weight_bits: int) -> None:
        """None: weights are dequantised."""

    def check_int8_cache(self, *, is_latent: bool) -> None:
        """They may."""

    def bind_thread(self) -> None:
        """Nothing: memory of the host is every thread's."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> ReferenceLinear:
        """Keep the weight as it is."""
        return ReferenceLinear(weight, bias)

    def quantized_linear(
        self, weight: QuantizedRows, bias: Tensor | None
    ) -> ReferenceQuantizedLinear:
        """Keep the weight as it is."""
        return ReferenceQuantizedLinear(weight, bias)

    def quantized_vocabulary(self, weight: QuantizedRows) -> ReferenceQuantizedLinear:
        """Keep the weight as it is."""
        return ReferenceQuantizedLinear(weight, None)

    def vocabulary(self, weight: Tensor) -> ReferenceLinear:
        """As any other."""
        return self.linear(weight, None)

    def reduce_scattered(self, linear: object, group: ExchangeGroup) -> None:
        """None: the group's own collective follows the product."""

    def gathered(self, linear: object, group: ExchangeGroup) -> None:
        """None: the group's own collective goes before the product."""

    def prefetch(self, linear: object, dependency: Tensor) -> None:
        """Nothing: the processor does it by itself."""

    def grouped_linear(self, weight: Tensor) -> LinearPerGroup:
        """Keep the weight as it is."""
        return LinearPerGroup([ReferenceLinear(group, None) for group in weight], weight.shape)

    def grouped_quantized_linear(self, weights: Sequence[QuantizedRows]) -> LinearPerGroup:
        """Keep the weights as they are."""
        shape = torch.Size((len(weights), *weights[0].shape))
        return LinearPerGroup([ReferenceQuantizedLinear(w, None) for w in weights], shape)

    def gated_experts(self, gate_up: GroupedProduct, down: GroupedProduct) -> ExpertsByParts:
        """One op after the other."""
        return ExpertsByParts(gate_up, down, self.silu_mul)

    def expert_dispatch(self, group: ExchangeGroup, sizes: ExchangeSizes) -> None:
        """None: rows travel by the group's own all-to-all."""

    def moe_gating_topk_softmax(
        self, router_logits: Tensor, k: int, *, is_normalized: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Softmax over all experts, in float32, then the top k."""
        topk_weights, topk_ids = router_logits.float().softmax(dim=-1).topk(k, dim=-1)
        if is_normalized:
            topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        return topk_weights, topk_ids

    def moe_gating_topk(
        self, router_logits: Tensor, gating: Gating, correction_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.moe_gating_topk`."""
        return gating_topk(router_logits, gating, correction_bias)

    def moe_init_routing(
        self, x: Tensor, topk_ids: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Ops.moe_init_routing`; row i comes from the row_index[i]-th choice of all."""
        expert_ids, row_index = topk_ids.flatten().sort(stable=True)  # [T * k]
        rows = x.index_select(0, row_index // topk_ids.shape[1])
        return rows, row_index, torch.bincount(expert_ids, minlength=num_experts)

    def moe_finalize_routing(self, rows: Tensor, row_index: Tensor, topk_weights: Tensor) -> Tensor:
        """See `Ops.moe_finalize_routing`."""
        num_tokens, k = topk_weights.shape
        weighted = rows * topk_weights.flatten()[row_index, None]
        # NOTE: adds a token's experts one by one, in ascending order, so that a token has the same
        # bits in any batch.
        total = weighted.new_zeros(num_tokens, rows.shape[1])
        return total.index_add_(0, row_index // k, weighted)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Their sum."""
        return x + y

    def rotary_table(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """They themselves."""
        return cos, sin

    def parameter(self, weight: Tensor, *, is_exact: bool = False) -> Tensor:
        """It itself."""
        return weight

    def slot_index(self, slot_mapping: Tensor, k_cache: KVCache, v_cache: KVCache) -> Tensor:
        """slot_mapping."""
        return slot_mapping

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight, in float32."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (normed * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotary_kv_write(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Rotate q and k, write k and v into their slots; see `Ops.rotary_kv_write`."""
        block_size = k_cache.shape[2]
        kept = slot_mapping >= 0
        slots = slot_mapping[kept].long()
        block_ids, offsets = slots // block_size, slots % block_size
        write_rows(k_cache, block_ids, offsets, _rotate(k, cos, sin)[kept])
        write_rows(v_cache, block_ids, offsets, v[kept])
        return _rotate(q, cos, sin)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        context_lens: Tensor,
        scale: float,
        max_seqlen_q: int,
        window: int = 0,
    ) -> Tensor:
        """softmax(scale q k^T + mask) v, a sequence at a time; see `Ops.paged_attention`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        starts = cu_seqlens_q.tolist()
        for seq, context_len in enumerate(context_lens.tolist()):
            rows = slice(starts[seq], starts[seq + 1])
            keys = _gather(k_cache, block_table[seq], context_len)
            values = _gather(v_cache, block_table[seq], context_len)
            out[rows] = _causal_attention(q[rows], keys, values, scale, window)
        return out

    def interleave_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Ops.interleave_rope`."""
        return mla.interleave_rope(x, cos, sin)

    def kv_rmsnorm_rope(
        self,
        kv: Tensor,
        weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        latent_cache: KVCache,
        rope_cache: KVCache,
        slot_mapping: Tensor,
        eps: float,
    ) -> tuple[KVCache, KVCache]:
        """See `Ops.kv_rmsnorm_rope`."""
        mla.kv_rmsnorm_rope(kv, weight, cos, sin, latent_cache, rope_cache, slot_mapping, eps)
        return latent_cache, rope_cache

    def latent_prolog(self, weights: LatentWeights) -> None:
        """None: op by op."""

    def head_matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Ops.head_matmul`."""
        return mla.head_matmul(x, weight)

    def mla_paged_attention(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent_cache: KVCache,
        rope_cache: KVCache,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        context_lens: Tensor,
        scale: float,
        max_seqlen_q: int,
    ) -> Tensor:
        """See `Ops.mla_paged_attention`."""
        return mla.paged_attention(
            q_latent,
            q_rope,
            latent_cache,
            rope_cache,
            block_table,
            cu_seqlens_q,
            context_lens,
            scale,
        )

    def mla_prefill_attention(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        latent_cache: KVCache,
        rope_cache: KVCache,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        context_lens: Tensor,
        scale: float,
        max_seqlen_q: int,
    ) -> Tensor:
        """See `Ops.mla_prefill_attention`."""
        return mla.prefill_attention(
            q_nope,
            q_rope,
            w_uk,
            w_uv,
            latent_cache,
            rope_cache,
            block_table,
            cu_seqlens_q,
            context_lens,
            scale,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(first half) * second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def top_k_top_p(self, logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
        """See `Ops.top_k_top_p`."""
        return top_k_top_p(logits, top_k, top_p)

    argmax = staticmethod(argmax)
    draw = staticmethod(draw)

    def queue(self) -> ThreadQueue:
        """See `Ops.queue`."""
        return ThreadQueue()

    def mark(self) -> Wait:
        """See `Ops.mark`: whatever was called has been done."""
        return nothing_to_wait_for

    def set_lent_threads(self, flags: Sequence[int]) -> None:
        """Nothing: these ops do not compute on threads of their own."""

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of weight."""
        return functional.embedding(token_ids, weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, D]; cos, sin: [T, D/2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)


def _gather(cache: KVCache, block_ids: Tensor, context_len: int) -> Tensor:
    """The first context_len keys or values of a sequence. -> [Hkv, context_len, D]."""
    block_size = cache.shape[2]
    num_blocks = (context_len + block_size - 1) // block_size
    blocks = read_blocks(cache, block_ids[:num_blocks].long())  # [n, Hkv, block_size, D]
    return blocks.transpose(0, 1).flatten(1, 2)[:, :context_len]


def _causal_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int) -> Tensor:
    """q: [S, Hq, D]; keys, values: [Hkv, C, D], the last S the queries' own. -> [S, Hq, D]."""
    q_len, num_heads, head_dim = q.shape
    num_kv_heads, context_len, _ = keys.shape
    grouped = q.transpose(0, 1).reshape(num_kv_heads, num_heads // num_kv_heads, q_len, head_dim)
    scores = scale * (grouped.float() @ keys.float()[:, None].transpose(-1, -2))
    last_key = torch.arange(context_len - q_len, context_len, device=q.device)[:, None]
    positions = torch.arange(context_len, device=q.device)[None, :]
    hidden = positions > last_key  # [S, C]
    if window:
        hidden |= positions <= last_key - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    out = weights @ values.float()[:, None]  # [Hkv, G, S, D]
    return out.reshape(num_heads, q_len, head_dim).transpose(0, 1).to(q.dtype)
