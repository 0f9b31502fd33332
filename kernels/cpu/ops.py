"""The ops on the C++ kernels."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels import mla
from kernels.cpu.build import build
from kernels.cpu.fakes import register_fakes
from kernels.cpu.options import DEFAULT_OPTIONS, CpuOptions
from kernels.device_queue import ThreadQueue, Wait, nothing_to_wait_for
from kernels.drawing import DrawParams
from kernels.experts import ExchangeGroup, ExchangeSizes, ExpertsByParts, GroupedProduct
from kernels.gating import Gating
from kernels.kv_cache import KVCache, tensors_of
from kernels.latent import LatentWeights
from kernels.narrowing import top_k_top_p
from kernels.packed import PackedWeight
from kernels.quantized import QuantizedRows

# Expanded keys and values of latent attention that exist at once: 64 MiB.
_EXPANDED_FLOATS = 1 << 24
# Of a weight that is packed: 512 KiB as floats.
_NUMBERS_AT_A_TIME = 1 << 17


class CpuLinear:
    """A weight packed into panels, and the only copy of it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.pdserve_cpu.pack_weight(weight)
        self._bias: Tensor | None = None
        if bias is not None:
            padded_features = self._packed.shape[0] * self._packed.shape[2]
            self._bias = bias.new_zeros(padded_features)
            self._bias[: self.out_features] = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in_features] float32 -> [T, out_features]; a row is the same in any batch."""
        result: Tensor = torch.ops.pdserve_cpu.linear(
            x, self._packed, self._bias, self.out_features
        )
        return result

    def join(self, groups: Any) -> None:
        """Become the next group of a pdserve_cpu.GroupedLinear."""
        groups.add(self._packed)

    def packed(self) -> PackedWeight:
        """See `Linear.packed`."""
        return PackedWeight.of(self._packed, self._bias, form=("float", self.out_features))

    def rows(self, row_ids: Tensor) -> Tensor:
        """row_ids: [T] -> [T, in_features]: rows of W, gathered from the panels."""
        result: Tensor = torch.ops.pdserve_cpu.packed_rows(self._packed, row_ids, self.out_features)
        return result


class CpuQuantizedLinear:
    """A weight in 4, 8 or 16 bits, packed into panels with its scales and offsets."""

    def __init__(
        self, weight: QuantizedRows, bias: Tensor | None, options: CpuOptions = DEFAULT_OPTIONS
    ) -> None:
        self.out_features, self.in_features = weight.shape
        # NOTE: whether float16 holds all factors is known at the end only; most formats have that.
        packed = _pack_quantized(weight, has_half_factors=True)
        has_half_factors = packed is not None
        if packed is None:
            packed = _pack_quantized(weight, has_half_factors=False)
        assert packed is not None, "float32 holds every factor"
        self._packed = packed
        form = weight.form
        self._form = (
            self.out_features,
            self.in_features,
            form.group_size,
            form.num_bits,
            form.has_offset,
            has_half_factors,
        )
        # The kernel does not look at it where weights have 16 bits.
        self._input_bits = options.input_bits(form.num_bits) or 16
        self._bias: Tensor | None = None
        if bias is not None:
            cols = torch.ops.pdserve_cpu.panel_cols()
            padding = self._packed.shape[0] * cols - self.out_features
            self._bias = functional.pad(bias, (0, padding))

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in_features] float32 -> [T, out_features]; a row is the same in any batch."""
        result: Tensor = torch.ops.pdserve_cpu.quantized_linear(
            x, self._packed, self._bias, *self._form, self._input_bits
        )
        return result

    def join(self, groups: Any) -> None:
        """Become the next group of a pdserve_cpu.GroupedLinear."""
        groups.add_quantized(self._packed, *self._form[2:], self._input_bits)

    def packed(self) -> PackedWeight:
        """See `Linear.packed`."""
        return PackedWeight.of(self._packed, self._bias, form=self._form)

    def rows(self, row_ids: Tensor) -> Tensor:
        """row_ids: [T] -> [T, in_features]: rows of W, dequantised."""
        result: Tensor = torch.ops.pdserve_cpu.quantized_rows(self._packed, row_ids, *self._form)
        return result


class CpuGroupedLinear:
    """Weights per group, all in floats or all in few bits; whatever is routed, one region of work.

    Implements `kernels.ops.GroupedLinear`.
    """

    def __init__(self, linears: Sequence[CpuLinear] | Sequence[CpuQuantizedLinear]) -> None:
        """linears: of one shape, without biases."""
        self.num_groups = len(linears)
        self.in_features, self.out_features = linears[0].in_features, linears[0].out_features
        self._linears = linears
        self._groups = torch.classes.pdserve_cpu.GroupedLinear(self.out_features, self.in_features)
        for linear in linears:
            linear.join(self._groups)

    def __call__(self, x: Tensor, group_sizes: Tensor) -> Tensor:
        """See `GroupedLinear`; a row is the same in any batch.

        Raises: ValueError: the sizes do not fit the rows or the groups.
        """
        result: Tensor = self._groups.call(x, group_sizes)
        return result

    def packed(self, group: int) -> PackedWeight:
        """See `GroupedLinear.packed`."""
        return self._linears[group].packed()


def _pack_quantized(weight: QuantizedRows, *, has_half_factors: bool) -> Tensor | None:
    """Some panels at a time; None if a factor is no float16 and has to be one."""
    num_outputs, num_inputs = weight.shape
    cols: int = torch.ops.pdserve_cpu.panel_cols()
    step = max(1, _NUMBERS_AT_A_TIME // (cols * num_inputs)) * cols
    packed: Tensor | None = None
    for start in range(0, num_outputs, step):
        part = weight.rows(slice(start, min(start + step, num_outputs)))
        if has_half_factors and not part.has_half_factors:
            return None
        panels: Tensor = torch.ops.pdserve_cpu.pack_quantized(
            part.values.contiguous(),
            part.scale.contiguous(),
            None if part.offset is None else part.offset.contiguous(),
            part.group_size,
            part.num_bits,
            has_half_factors,
        )
        if packed is None:
            packed = torch.ops.pdserve_cpu.empty_panels(-(-num_outputs // cols), panels.shape[1])
        packed[start // cols : start // cols + len(panels)] = panels
    return packed


class CpuOps:
    """Implements `kernels.ops.Ops` for float32 on the CPU; construct through `load`."""

    name = "cpu"
    num_spare_blocks = 0
    device = torch.device("cpu")
    cache_dtype = "float32"
    collectives = "gloo"
    samples_on_device = False
    runs_ahead = False
    max_top_k = 2**31 - 1

    def __init__(self, options: CpuOptions) -> None:
        self.options = options

    def input_bits(self, weight_bits: int) -> int | None:
        """See `CpuOptions.input_bits`."""
        return self.options.input_bits(weight_bits)

    def check_int8_cache(self, *, is_latent: bool) -> None:
        """They may."""

    def bind_thread(self) -> None:
        """Nothing: memory of the host is every thread's."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> CpuLinear:
        """Pack; the caller drops its own copy."""
        return CpuLinear(weight, bias)

    def quantized_linear(self, weight: QuantizedRows, bias: Tensor | None) -> CpuQuantizedLinear:
        """Pack; the caller drops its own copy."""
        return CpuQuantizedLinear(weight, bias, self.options)

    def quantized_vocabulary(self, weight: QuantizedRows) -> CpuQuantizedLinear:
        """See `Ops.quantized_vocabulary`."""
        return self.quantized_linear(weight, None)

    def vocabulary(self, weight: Tensor) -> CpuLinear:
        """As any other."""
        return self.linear(weight, None)

    def reduce_scattered(self, linear: object, group: ExchangeGroup) -> None:
        """None: the group's own collective follows the product."""

    def gathered(self, linear: object, group: ExchangeGroup) -> None:
        """None: the group's own collective goes before the product."""

    def prefetch(self, linear: object, dependency: Tensor) -> None:
        """Nothing: the processor does it by itself."""

    def grouped_linear(self, weight: Tensor) -> CpuGroupedLinear:
        """Pack every group; the caller drops its own copy."""
        return CpuGroupedLinear([CpuLinear(group, None) for group in weight])

    def grouped_quantized_linear(self, weights: Sequence[QuantizedRows]) -> CpuGroupedLinear:
        """Pack every group; the caller drops its own copy."""
        return CpuGroupedLinear([self.quantized_linear(weight, None) for weight in weights])

    def gated_experts(self, gate_up: GroupedProduct, down: GroupedProduct) -> ExpertsByParts:
        """One op after the other."""
        return ExpertsByParts(gate_up, down, self.silu_mul)

    def expert_dispatch(self, group: ExchangeGroup, sizes: ExchangeSizes) -> None:
        """None: rows travel by the group's own all-to-all."""

    def moe_gating_topk_softmax(
        self, router_logits: Tensor, k: int, *, is_normalized: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.moe_gating_topk_softmax`."""
        gating = Gating(num_experts_per_tok=k, is_normalized=is_normalized)
        return self.moe_gating_topk(router_logits, gating, None)

    def moe_gating_topk(
        self, router_logits: Tensor, gating: Gating, correction_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.moe_gating_topk`; of equals the first is chosen first."""
        topk_weights, topk_ids = torch.ops.pdserve_cpu.moe_gating_topk(
            router_logits,
            correction_bias,
            gating.num_experts_per_tok,
            gating.scoring == "sigmoid",
            gating.num_groups,
            gating.num_groups_per_tok,
            gating.group_scoring == "top2_sum",
            gating.is_normalized,
            gating.scaling_factor,
        )
        return topk_weights, topk_ids

    def moe_init_routing(
        self, x: Tensor, topk_ids: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Ops.moe_init_routing`; row i comes from the row_index[i]-th choice of all."""
        rows, row_index, sizes = torch.ops.pdserve_cpu.moe_init_routing(x, topk_ids, num_experts)
        return rows, row_index, sizes

    def moe_finalize_routing(self, rows: Tensor, row_index: Tensor, topk_weights: Tensor) -> Tensor:
        """See `Ops.moe_finalize_routing`."""
        result: Tensor = torch.ops.pdserve_cpu.moe_finalize_routing(rows, row_index, topk_weights)
        return result

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """See `Ops.add`."""
        result: Tensor = torch.ops.pdserve_cpu.add(x, y)
        return result

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
        """See `Ops.rms_norm`."""
        result: Tensor = torch.ops.pdserve_cpu.rms_norm(x, weight, eps)
        return result

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.add_rms_norm`; the sum replaces `residual`."""
        normed: Tensor = torch.ops.pdserve_cpu.add_rms_norm(x, residual, weight, eps)
        return normed, residual

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
        """See `Ops.rotary_kv_write`."""
        k_values, k_scale = tensors_of(k_cache)
        v_values, v_scale = tensors_of(v_cache)
        result: Tensor = torch.ops.pdserve_cpu.rotary_kv_write(
            q, k, v, cos, sin, k_values, v_values, slot_mapping, k_scale, v_scale
        )
        return result

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
        """See `Ops.paged_attention`; a query's result is the same in any batch or chunking."""
        k_values, k_scale = tensors_of(k_cache)
        v_values, v_scale = tensors_of(v_cache)
        result: Tensor = torch.ops.pdserve_cpu.paged_attention(
            q,
            k_values,
            v_values,
            block_table,
            cu_seqlens_q,
            context_lens,
            scale,
            window,
            k_scale,
            v_scale,
        )
        return result

    def interleave_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Ops.interleave_rope`."""
        result: Tensor = torch.ops.pdserve_cpu.interleave_rope(x, cos, sin)
        return result

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
        latents, latent_scale = tensors_of(latent_cache)
        ropes, rope_scale = tensors_of(rope_cache)
        torch.ops.pdserve_cpu.kv_rmsnorm_rope(
            kv, weight, cos, sin, latents, ropes, slot_mapping, eps, latent_scale, rope_scale
        )
        return latent_cache, rope_cache

    def latent_prolog(self, weights: LatentWeights) -> None:
        """None: op by op."""

    def head_matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """See `Ops.head_matmul`; a row is the same in any batch."""
        result: Tensor = torch.ops.pdserve_cpu.head_matmul(x, weight)
        return result

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
        """See `Ops.mla_paged_attention`; a query's result is the same in any batch."""
        latents, latent_scale = tensors_of(latent_cache)
        ropes, rope_scale = tensors_of(rope_cache)
        result: Tensor = torch.ops.pdserve_cpu.mla_paged_attention(
            q_latent,
            q_rope,
            latents,
            ropes,
            block_table,
            cu_seqlens_q,
            context_lens,
            scale,
            latent_scale,
            rope_scale,
        )
        return result

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
        """See `Ops.mla_prefill_attention`; keys and values of a few heads at a time."""
        out = q_nope.new_empty(*q_nope.shape[:2], w_uv.shape[2])
        sequences = mla.sequences(latent_cache, rope_cache, block_table, cu_seqlens_q, context_lens)
        for rows, latent, rope in sequences:
            q = torch.cat([q_nope[rows], q_rope[rows]], dim=-1)
            floats_per_head = len(latent) * (q.shape[2] + w_uv.shape[2])
            step = max(1, _EXPANDED_FLOATS // floats_per_head)
            for first in range(0, q.shape[1], step):
                heads = slice(first, first + step)
                keys, values = mla.expand(latent, rope, w_uk[heads], w_uv[heads])
                out[rows, heads] = _attend_to(q[:, heads], keys, values, scale)
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        result: Tensor = torch.ops.pdserve_cpu.silu_mul(gate_up)
        return result

    def top_k_top_p(self, logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
        """See `Ops.top_k_top_p`."""
        return top_k_top_p(logits, top_k, top_p)

    def argmax(self, logits: Tensor) -> Tensor:
        """See `Ops.argmax`; a NaN is never the largest."""
        result: Tensor = torch.ops.pdserve_cpu.argmax(logits)
        return result

    def draw(self, logits: Tensor, params: DrawParams, numbers: Tensor) -> Tensor:
        """See `Ops.draw`; a NaN is never drawn."""
        options = params.inverse_temperature, params.log_min_p, params.top_k, params.top_p
        result: Tensor = torch.ops.pdserve_cpu.draw(logits, *options, numbers)
        return result

    def queue(self) -> ThreadQueue:
        """See `Ops.queue`."""
        return ThreadQueue()

    def mark(self) -> Wait:
        """See `Ops.mark`: whatever was called has been done."""
        return nothing_to_wait_for

    def set_lent_threads(self, flags: Sequence[int]) -> None:
        """See `Ops.set_lent_threads`; torch's own number of threads comes on top."""
        torch.ops.pdserve_cpu.set_lent_threads(list(flags))

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """See `Ops.embedding`."""
        result: Tensor = torch.ops.pdserve_cpu.embedding(token_ids, weight)
        return result


def _attend_to(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence. q: [S, H, D]; keys, values: [H, C, ...] -> [S, H, Dv]."""
    context_len = keys.shape[1]
    result: Tensor = torch.ops.pdserve_cpu.paged_attention(
        q,
        keys[None],  # a cache of one block
        values[None],
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, len(q)], dtype=torch.int32),
        torch.tensor([context_len], dtype=torch.int32),
        scale,
    )
    return result


def load(options: CpuOptions = DEFAULT_OPTIONS) -> CpuOps:
    """Build the kernels if need be and load them into this process, once.

    Raises: BuildError: they cannot be built. OSError: they cannot be loaded.
    """
    _load_library()
    return CpuOps(options)


@functools.cache
def _load_library() -> None:
    torch.ops.load_library(str(build()))  # type: ignore[no-untyped-call]
    register_fakes()
