"""The ops on Ascend NPUs, by torch_npu's operators. The one module of the engine that imports it.

Shapes that an operator does not take are refused before it is launched: on the device some fail
without a word, or as a memory fault much later. What each operator does is in its own module under
kernels/ascend; docs/npu.md says how all of it is checked without an NPU.
"""

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch_npu
import torch_npu.dynamo.torchair
from torch import Tensor
from torch.nn import functional

from kernels.ascend import attention, mla, routing, sampling
from kernels.ascend.attention import AttentionCall, Launch
from kernels.ascend.cache import write_rows
from kernels.ascend.collective_linear import GatheredProduct, ReduceScatteredProduct, fits
from kernels.ascend.experts import ExpertGroup, NpuExpertDispatch
from kernels.ascend.gated import NpuInt8Experts
from kernels.ascend.hccl import ExpertExchange, Product, buffer_mib_of, product_of
from kernels.ascend.linear import (
    NpuGroupedInt8Linear,
    NpuGroupedLinear,
    NpuInt8Linear,
    NpuLinear,
    NpuQuantizedLinear,
    frozen,
)
from kernels.ascend.options import DEFAULT_OPTIONS, NpuOptions
from kernels.ascend.prolog import NpuLatentProlog
from kernels.ascend.queue import StreamQueue, mark
from kernels.ascend.streams import prefetch
from kernels.device_queue import Wait
from kernels.drawing import argmax, draw
from kernels.experts import (
    ExchangeGroup,
    ExchangeSizes,
    ExpertDispatch,
    ExpertsByParts,
    GatedExperts,
)
from kernels.gating import Gating
from kernels.kv_cache import KVCache, floats_of
from kernels.latent import LatentWeights
from kernels.ops import GroupedLinear, Linear, Ops, RowProduct
from kernels.quantized import QuantizedRows, QuantizedWeight, whole

# NOTE: TorchAir defines these operators when it is first asked for them; within a trace that is too
# late.
for _name in ("ops._npu_fused_infer_attention_score_v2", "scope._wait_tensor"):
    importlib.import_module(f"torchair.{_name}")

_MAX_ROTARY_HEADS = 999
_MAX_HEAD_DIM = 512


class NpuOps:
    """Implements `kernels.ops.Ops`; construct through `load`.

    cu_seqlens_q and context_lens are host tensors, except in a graph that TorchAir compiles.
    """

    name = "npu"
    collectives = "cpu:gloo,npu:hccl"
    num_spare_blocks = 1
    samples_on_device = True
    runs_ahead = True
    max_top_k = sampling.MAX_TOP_K

    def __init__(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        options: NpuOptions = DEFAULT_OPTIONS,
        product: Product | None = None,
        buffer_mib: int | None = None,
    ) -> None:
        """dtype: of weights, activations and caches. float32 is for checks without an NPU.

        product: None has no operators that reach experts on other ranks.
        buffer_mib: HCCL's, of every communicator; None leaves it unchecked.
        """
        self.device = device
        self.dtype = dtype
        self.cache_dtype = str(dtype).removeprefix("torch.")
        self.options = options
        self._product = product
        self._buffer_mib = buffer_mib
        self._mask = attention.causal_mask(device)
        self._launch: Launch = attention.launch

    def input_bits(self, weight_bits: int) -> int | None:
        """8 where the products of int8 take them, else floats."""
        return 8 if weight_bits == 8 and self.options.quantize_activations else None

    def check_int8_cache(self, *, is_latent: bool) -> None:
        """See `Ops.check_int8_cache`."""
        if is_latent:
            raise ValueError(
                "kv_cache_dtype is int8: npu_fused_infer_attention_score_v2 takes latents "
                "(query_rope, key_rope) in floats alone, use auto"
            )

    def bind_thread(self) -> None:
        """See `Ops.bind_thread`: a thread's calls go to the device that it set, or to the first."""
        if self.device.type == "npu":
            torch_npu.npu.set_device(self.device)

    @contextmanager
    def attention_through(self, launch: Launch) -> Iterator[None]:
        """Hand every attention call to `launch` meanwhile: a graph that is captured keeps them."""
        saved, self._launch = self._launch, launch
        try:
            yield
        finally:
            self._launch = saved

    def linear(self, weight: Tensor, bias: Tensor | None) -> NpuLinear:
        """Bring the weight to the device, and into the layout that products read fastest."""
        return self._linear(self.parameter(weight), bias)

    def vocabulary(self, weight: Tensor) -> NpuLinear:
        """Bring the weight to the device as it is."""
        return NpuLinear(self.parameter(weight), None)

    def _linear(self, weight: Tensor, bias: Tensor | None) -> NpuLinear:
        bias = None if bias is None else self.parameter(bias)
        return NpuLinear(weight, bias, is_nz=not self.options.fuse_collectives)

    def reduce_scattered(self, linear: Linear, group: ExchangeGroup) -> RowProduct | None:
        """See `Ops.reduce_scattered`."""
        if not (self.options.fuse_collectives and fits(linear)):
            return None
        assert isinstance(linear, NpuLinear)
        return ReduceScatteredProduct(linear, group)

    def gathered(self, linear: Linear, group: ExchangeGroup) -> RowProduct | None:
        """See `Ops.gathered`."""
        if not (self.options.fuse_collectives and fits(linear)):
            return None
        assert isinstance(linear, NpuLinear)
        return GatheredProduct(linear, group)

    def prefetch(self, linear: Linear, dependency: Tensor) -> None:
        """See `Ops.prefetch`; plain weights alone."""
        if self.options.prefetch and isinstance(linear, NpuLinear):
            prefetch(linear.weight, dependency)

    def grouped_linear(self, weight: Tensor) -> NpuGroupedLinear:
        """Transpose the weight once, on the device."""
        return NpuGroupedLinear(self.parameter(weight))

    def quantized_linear(
        self, weight: QuantizedRows, bias: Tensor | None
    ) -> NpuLinear | NpuInt8Linear | NpuQuantizedLinear:
        """Transpose the weight once; one that no operator takes is brought to floats."""
        placed = self._placed(whole(weight))
        if bias is not None:
            bias = self.parameter(bias)
        if self.options.quantize_activations and placed.is_int8_per_row:
            return NpuInt8Linear(placed, bias, dtype=self.dtype)
        if NpuQuantizedLinear.fits(placed):
            return NpuQuantizedLinear(placed, bias, dtype=self.dtype)
        return self._linear(self.parameter(placed.dequantize()), bias)

    def quantized_vocabulary(self, weight: QuantizedRows) -> NpuLinear:
        """In floats: a vocabulary has more outputs than the quantised operators take."""
        return NpuLinear(self.parameter(whole(weight).dequantize()), None)

    def grouped_quantized_linear(
        self, weights: Sequence[QuantizedRows]
    ) -> NpuGroupedLinear | NpuGroupedInt8Linear:
        """One stack of int8 weights with a scale per output; others are brought to floats."""
        groups = [whole(weight) for weight in weights]
        if all(group.is_int8_per_row for group in groups):
            return NpuGroupedInt8Linear(
                torch.stack([group.values for group in groups]).to(self.device),
                torch.stack([group.scale[:, 0] for group in groups]).to(self.device),
                dtype=self.dtype,
                quantizes_activations=self.options.quantize_activations,
            )
        return self.grouped_linear(torch.stack([group.dequantize() for group in groups]))

    def _placed(self, weight: QuantizedWeight) -> QuantizedWeight:
        offset = weight.offset
        return replace(
            weight,
            values=weight.values.to(self.device),
            scale=weight.scale.to(self.device),
            offset=None if offset is None else offset.to(self.device),
        )

    def parameter(self, weight: Tensor, *, is_exact: bool = False) -> Tensor:
        """See `Ops.parameter`."""
        return frozen(weight.to(self.device, weight.dtype if is_exact else self.dtype))

    def gated_experts(self, gate_up: GroupedLinear, down: GroupedLinear) -> GatedExperts:
        """In int8 from end to end where both weights are for it."""
        if NpuInt8Experts.fits(gate_up, down):
            assert isinstance(gate_up, NpuGroupedInt8Linear)
            assert isinstance(down, NpuGroupedInt8Linear)
            return NpuInt8Experts(gate_up, down)
        return ExpertsByParts(gate_up, down, self.silu_mul)

    def expert_dispatch(self, group: ExchangeGroup, sizes: ExchangeSizes) -> ExpertDispatch | None:
        """See `Ops.expert_dispatch`."""
        if self._product is None:
            return None
        exchange = ExpertExchange(
            product=self._product,
            ep_size=group.size,
            num_experts=sizes.num_experts,
            num_experts_per_tok=sizes.num_experts_per_tok,
            hidden_size=sizes.hidden_size,
            max_tokens=sizes.max_tokens,
        )
        exchange.check(self._buffer_mib)
        return NpuExpertDispatch(
            ExpertGroup(
                communicator=group.communicator,
                rank=group.rank,
                sizes=exchange,
                is_even=sizes.is_even,
            ),
            is_multi_stream=self.options.multi_stream,
        )

    def moe_gating_topk_softmax(
        self, router_logits: Tensor, k: int, *, is_normalized: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.moe_gating_topk_softmax`."""
        topk_weights, topk_ids = routing.gating_topk_softmax(router_logits, k)
        if is_normalized:
            topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        return topk_weights, topk_ids

    def moe_gating_topk(
        self, router_logits: Tensor, gating: Gating, correction_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.moe_gating_topk`."""
        return routing.gating_topk(router_logits, gating, correction_bias)

    def moe_init_routing(
        self, x: Tensor, topk_ids: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Ops.moe_init_routing`."""
        return routing.init_routing(x, topk_ids, num_experts)

    def moe_finalize_routing(self, rows: Tensor, row_index: Tensor, topk_weights: Tensor) -> Tensor:
        """See `Ops.moe_finalize_routing`."""
        return routing.finalize_routing(rows, row_index, topk_weights)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """See `Ops.add`."""
        return x + y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`."""
        out: Tensor = torch.ops.npu.npu_rms_norm(x, weight, eps)[0]
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.add_rms_norm`."""
        normed, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def rotary_table(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Both halves of a head rotate alike: [P, D/2] -> [P, D] each, in the compute dtype."""
        return (
            self.parameter(torch.cat([cos, cos], dim=-1)),
            self.parameter(torch.cat([sin, sin], dim=-1)),
        )

    def slot_index(self, slot_mapping: Tensor, k_cache: KVCache, v_cache: KVCache) -> Tensor:
        """Where each head of each token is written; tokens without a slot to the spare block.

        [T, Hkv, 3] int32: block, head, offset. With MLA, whose parts differ in width, [T] int64.
        """
        num_blocks, num_heads, block_size = k_cache.shape[:3]
        is_latent = k_cache.shape[3] != v_cache.shape[3]
        if is_latent:
            block_size *= num_heads  # token_major or head_major: there is one head
        if block_size != attention.BLOCK_SIZE:
            raise ValueError(
                f"block_size is {block_size}, the NPU operators take {attention.BLOCK_SIZE}"
            )
        slots = torch.where(slot_mapping < 0, (num_blocks - 1) * block_size, slot_mapping)
        if is_latent:
            return slots.long()
        heads = torch.arange(num_heads, dtype=torch.int32, device=slots.device)
        shape = (len(slots), num_heads)
        return torch.stack(
            [
                (slots // block_size).int()[:, None].expand(shape),
                heads.expand(shape),
                (slots % block_size).int()[:, None].expand(shape),
            ],
            dim=-1,
        )

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
        num_heads, head_dim = q.shape[1:]
        if num_heads > _MAX_ROTARY_HEADS or head_dim > _MAX_HEAD_DIM or head_dim % 2:
            raise ValueError(
                f"rotary: {num_heads} heads of {head_dim}, the NPU takes {_MAX_ROTARY_HEADS} heads "
                f"of an even width up to {_MAX_HEAD_DIM}"
            )
        # [1, T, heads, D], as one sequence.
        cos, sin = cos[None, :, None], sin[None, :, None]
        rotated_k = torch.ops.npu.npu_rotary_mul(k.unsqueeze(0), cos, sin).squeeze(0)
        write_rows(k_cache, slot_mapping, rotated_k)
        write_rows(v_cache, slot_mapping, v)
        rotated_q: Tensor = torch.ops.npu.npu_rotary_mul(q.unsqueeze(0), cos, sin).squeeze(0)
        return rotated_q

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
        """See `Ops.paged_attention`. Raises: ValueError: what the operator refuses."""
        call = attention.grouped_query(
            q,
            k_cache,
            v_cache,
            block_table,
            cu_seqlens_q,
            context_lens,
            scale,
            max_seqlen_q,
            self._mask,
            window,
        )
        return self._run(call, q.shape)

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
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.kv_rmsnorm_rope`."""
        return mla.kv_rmsnorm_rope(
            kv,
            weight,
            cos,
            sin,
            floats_of(latent_cache),
            floats_of(rope_cache),
            slot_mapping,
            eps,
            is_beside=self.options.multi_stream,
        )

    def latent_prolog(self, weights: LatentWeights) -> NpuLatentProlog | None:
        """One operator, for models of the widths that it takes."""
        if not (self.options.mla_prolog and NpuLatentProlog.fits(weights)):
            return None
        return NpuLatentProlog(weights)

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
        call = attention.latent(
            q_latent,
            q_rope,
            floats_of(latent_cache),
            floats_of(rope_cache),
            block_table,
            cu_seqlens_q,
            context_lens,
            scale,
            max_seqlen_q,
            self._mask,
        )
        return self._run(call, q_latent.shape)

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
        k_nope, k_rope, v = mla.expand(
            floats_of(latent_cache), floats_of(rope_cache), block_table, context_lens, w_uk, w_uv
        )
        call = attention.expanded(
            (q_nope, q_rope), (k_nope, k_rope), v, cu_seqlens_q, context_lens, scale, self._mask
        )
        return self._run(call, (*q_nope.shape[:2], v.shape[2]))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        out: Tensor = torch.ops.npu.npu_swiglu(gate_up)
        return out

    def top_k_top_p(self, logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
        """See `Ops.top_k_top_p`."""
        return sampling.top_k_top_p(logits, top_k, top_p)

    argmax = staticmethod(argmax)
    draw = staticmethod(draw)

    def queue(self) -> StreamQueue:
        """See `Ops.queue`."""
        return StreamQueue(torch_npu.npu, self.device)

    def mark(self) -> Wait:
        """See `Ops.mark`."""
        return mark(torch_npu.npu)

    def set_lent_threads(self, flags: Sequence[int]) -> None:
        """Nothing: these ops do not compute on threads of their own."""

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """See `Ops.embedding`."""
        return functional.embedding(token_ids, weight)

    def _run(self, call: AttentionCall, shape: tuple[int, ...]) -> Tensor:
        return self._launch(call).view(shape)


def load(options: NpuOptions) -> Ops:
    """The ops on this process's current NPU.

    Raises: RuntimeError: there is no NPU that torch_npu can use.
    """
    if not torch_npu.npu.is_available():
        raise RuntimeError("torch_npu finds no NPU; `pdserve doctor` says what is missing")
    # Weights may be stored in the layout of the matrix unit; operators are not compiled one by one.
    torch_npu.npu.config.allow_internal_format = True
    torch_npu.npu.set_compile_mode(jit_compile=False)
    return NpuOps(
        device=torch.device("npu", torch_npu.npu.current_device()),
        options=options,
        product=product_of(torch_npu.npu.get_device_name()),
        # HCCL takes it from this process's environment and from nowhere else.
        buffer_mib=buffer_mib_of(os.environ),
    )
