"""Every device operation the engine uses, as one interface; a backend is chosen once at start.

`reference.py` (plain PyTorch) is the specification, `cpu/` the C++ kernels, `npu.py` the Ascend
operators.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.ascend.options import DEFAULT_OPTIONS as DEFAULT_NPU_OPTIONS
from kernels.ascend.options import NpuOptions
from kernels.cpu.build import BuildError
from kernels.cpu.ops import load
from kernels.cpu.options import DEFAULT_OPTIONS as DEFAULT_CPU_OPTIONS
from kernels.cpu.options import CpuOptions
from kernels.device_queue import DeviceQueue, Wait
from kernels.drawing import DrawParams
from kernels.experts import ExchangeGroup, ExchangeSizes, ExpertDispatch, GatedExperts
from kernels.gating import Gating
from kernels.kv_cache import KVCache
from kernels.latent import LatentProlog, LatentWeights
from kernels.packed import PackedWeight
from kernels.quantized import QuantizedRows
from kernels.reference import ReferenceOps

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "cpu", "npu")


@runtime_checkable
class Linear(Protocol):
    """Weights of y = x W^T + b, in whatever packed form the backend computes fastest with."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in_features] float32 (or the compute dtype) -> [T, out_features]."""
        ...

    def rows(self, row_ids: Tensor) -> Tensor:
        """row_ids: [T] int32 or int64 -> [T, in_features]: rows of W.

        An embedding tied to this weight reads it here: no second copy of the weight is kept.
        """
        ...

    def packed(self) -> PackedWeight:
        """What it computes with; not a copy."""
        ...


RowProduct = Callable[[Tensor], Tensor]
"""x [T, in_features] -> [T', out_features]."""


@runtime_checkable
class GroupedLinear(Protocol):
    """Weights of y = x W[g]^T for the rows of each group g, packed; an expert is a group."""

    num_groups: int
    in_features: int
    out_features: int

    def __call__(self, x: Tensor, group_sizes: Tensor) -> Tensor:
        """x: [R, in_features], its rows sorted by group -> [R, out_features].

        group_sizes: [num_groups] int64, rows of each group; their sum is R. A group without rows
        costs nothing: its weight is not read.
        """
        ...

    def packed(self, group: int) -> PackedWeight:
        """What it computes the rows of one group with; not a copy."""
        ...


class Ops(Protocol):
    """Device operations. T: tokens of the flattened batch, N: sequences, D: head_dim."""

    name: str

    num_spare_blocks: int
    """Blocks of a cache past those that sequences get: what has no slot is written there."""

    device: torch.device
    """Where caches live."""

    cache_dtype: str
    """Of caches; a key of kvtransfer.layout.DTYPE_BYTES."""

    collectives: str
    """Backend of torch.distributed that groups of ranks use."""

    samples_on_device: bool
    """Whether logits stay on the device, where that suffices, and only tokens come to the host."""

    runs_ahead: bool
    """Whether the device computes beside the host, which may prepare the next step meanwhile."""

    max_top_k: int
    """Of `top_k_top_p`."""

    def input_bits(self, weight_bits: int) -> int | None:
        """What inputs of products with weights of 4 or 8 bits are rounded to; None: not at all."""
        ...

    def check_int8_cache(self, *, is_latent: bool) -> None:
        """Whether caches, of latents or of keys and values, may be in int8 with scales.

        Raises: ValueError: they may not; says why.
        """
        ...

    def bind_thread(self) -> None:
        """Let the calling thread work with the device's memory; every thread says so for itself."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Pack weight [out, in] (and bias [out]) once; the result is called in every step."""
        ...

    def vocabulary(self, weight: Tensor) -> Linear:
        """Pack weight [vocab, hidden] once; its rows are looked up too."""
        ...

    def reduce_scattered(self, linear: Linear, group: ExchangeGroup) -> RowProduct | None:
        """The product and the scatter of its sum over the group as one; None: they are two.

        x: [size * n, in_features], of this backend's `linear` -> [n, out_features].
        Raises: ValueError: a group that the device's operator does not take.
        """
        ...

    def gathered(self, linear: Linear, group: ExchangeGroup) -> RowProduct | None:
        """The gather of all ranks' rows and their product as one; None: they are two.

        x: [n, in_features] -> [size * n, out_features]. Raises as `reduce_scattered`.
        """
        ...

    def prefetch(self, linear: Linear, dependency: Tensor) -> None:
        """Hint that `linear` is called soon, from where `dependency` is computed."""
        ...

    def grouped_linear(self, weight: Tensor) -> GroupedLinear:
        """Pack weight [groups, out, in] once; see `GroupedLinear`."""
        ...

    def gated_experts(self, gate_up: GroupedLinear, down: GroupedLinear) -> GatedExperts:
        """Experts of packed weights of this backend; gate_up has an expert's two side by side."""
        ...

    def expert_dispatch(self, group: ExchangeGroup, sizes: ExchangeSizes) -> ExpertDispatch | None:
        """How the device's operators bring rows to experts on other ranks; None: it has none.

        group: for this alone; nothing else may communicate over it.
        Raises: ValueError: sizes that the operators do not take, or a buffer too small for them.
        """
        ...

    def moe_gating_topk_softmax(
        self, router_logits: Tensor, k: int, *, is_normalized: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The k largest of softmax(router_logits), largest first, and which they are.

        router_logits: [T, num_experts] -> topk_weights [T, k] float32, divided by their sum if
        is_normalized; topk_ids [T, k] int32 or int64.
        """
        ...

    def moe_gating_topk(
        self, router_logits: Tensor, gating: Gating, correction_bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The experts of each token by `gating`, the best choice first.

        router_logits: [T, num_experts]; correction_bias: [num_experts] float32, added to the scores
        for the choice alone, not in the weights. -> topk_weights [T, k] float32; topk_ids [T, k]
        int32 or int64. Shaped like npu_moe_gating_top_k.
        """
        ...

    def moe_init_routing(
        self, x: Tensor, topk_ids: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Copy each token once per expert of its own, sorted by expert.

        x: [T, H]; topk_ids: [T, k], below num_experts. -> rows [T * k, H]; row_index [T * k], to be
        given to moe_finalize_routing as it is; group_sizes [num_experts] int64, rows of each.
        """
        ...

    def moe_finalize_routing(self, rows: Tensor, row_index: Tensor, topk_weights: Tensor) -> Tensor:
        """Sum the rows of each token, weighted: the way back from moe_init_routing.

        rows: [T * k, H]; topk_weights: [T, k] float32 -> [T, H]. A token gets the same bits in any
        batch.
        """
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y. Both [T, H]."""
        ...

    def quantized_linear(self, weight: QuantizedRows, bias: Tensor | None) -> Linear:
        """Pack y = x W^T + b with W in 4, 8 or 16 bits. bias: [out].

        x is rounded to `input_bits`, in runs that share a scale. Asks for W some rows at a time
        where it can, and possibly twice for the same ones.
        """
        ...

    def quantized_vocabulary(self, weight: QuantizedRows) -> Linear:
        """A linear whose rows are looked up too, quantised if the backend can look them up."""
        ...

    def grouped_quantized_linear(self, weights: Sequence[QuantizedRows]) -> GroupedLinear:
        """The same per group; all of one shape."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dim. x: [T, H] or [T, heads, D]."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """s = x + residual; return (rms_norm(s), s). Both [T, H]; either may be overwritten."""
        ...

    def rotary_table(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin: [P, D/2] float32, a row per position -> tables; ops that rotate take rows."""
        ...

    def parameter(self, weight: Tensor, *, is_exact: bool = False) -> Tensor:
        """A weight that ops are given as it is, such as a norm's, where and as they take it.

        is_exact: it keeps its dtype.
        """
        ...

    def slot_index(self, slot_mapping: Tensor, k_cache: KVCache, v_cache: KVCache) -> Tensor:
        """What ops that write to caches shaped like these take as slot_mapping; once a step.

        slot_mapping: [T] int32, block_id * block_size + offset, -1 skips the write. -> T rows.
        """
        ...

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
        """Rotate q and k, write k and v to the paged cache, return rotated q.

        Half-split rotation, as Hugging Face's rotate_half. q: [T, Hq, D]; k, v: [T, Hkv, D] (views
        with a row stride are fine); cos, sin: [T, ...], rows of rotary_table; k_cache, v_cache:
        [num_blocks, Hkv, block_size, D]; slot_mapping: from slot_index. Returns
        [T, Hq, D] contiguous.
        """
        ...

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
        """Causal attention over paged KV that holds this step's own keys; blocks are read in place.

        q: [T, Hq, D]; caches as above; block_table: [N, max_blocks] int32 (unused entries
        arbitrary); cu_seqlens_q: [N + 1] int32; context_lens: [N] int32, keys of the sequence
        including this step's. Query i of a sequence with q_len queries sees keys
        [0, context_len - q_len + i], with a window the last `window` of these, its own included; 0
        means all. Decode rows are q_len 1; prefill chunks and decode rows may be mixed. Returns
        [T, Hq, D].
        """
        ...

    def interleave_rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate pairs of neighbours (x0, x1), (x2, x3), ..., as DeepSeek lays them out.

        x: [T, H, P], a view with strides is fine; cos, sin: [T, ...], rows of rotary_table. ->
        [T, H, P] contiguous, first of all pairs before second of all pairs, as npu_interleave_rope
        leaves it.
        """
        ...

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
        """Write MLA's cache: the normalised latent and the rotated rope part of each token.

        Returns both caches, for this step's attention to read: a compiled graph knows the order of
        two ops by what one hands to the other.

        kv: [T, R + P], rows may be strided; weight: [R], of the norm; cos, sin: [T, ...] as in
        `interleave_rope`, and rotated alike; latent_cache: [num_blocks, 1, block_size, R];
        rope_cache: [num_blocks, 1, block_size, P]; slot_mapping: from slot_index. Shaped like
        npu_kv_rmsnorm_rope_cache.
        """
        ...

    def latent_prolog(self, weights: LatentWeights) -> LatentProlog | None:
        """A decode step's work up to latent attention as one; None: it is done op by op."""
        ...

    def head_matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """A matrix per head: x [T, H, A], weight [H, A, B] -> [T, H, B], any strides.

        npu_transpose_batchmatmul with perm_x1 and perm_y (1, 0, 2).
        """
        ...

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
        """Causal MLA in absorbed form: softmax(scale (q_latent c + q_rope r)) c. For few queries.

        q_latent: [T, H, R], the query times the key's up-projection; q_rope: [T, H, P], rotated;
        caches as in `kv_rmsnorm_rope`; the rest as in `paged_attention`. Returns [T, H, R], still
        to be multiplied with the value's up-projection.
        """
        ...

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
        """The same maths in expanded form, for many queries: fewer operations per score.

        Keys [w_uk c | r] and values w_uv^T c of every sequence's whole context (prefix and chunk)
        are expanded from the cached latents; never all scores at once. q_nope: [T, H, Dn]; q_rope:
        [T, H, P], rotated; w_uk: [H, Dn, R]; w_uv: [H, R, Dv]; the rest as in
        `mla_paged_attention`. Returns [T, H, Dv].
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up: [T, 2 I] -> silu(gate_up[:, :I]) * gate_up[:, I:], [T, I]."""
        ...

    def top_k_top_p(self, logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
        """-inf in the place of what is not among the top_k largest, nor then in the nucleus top_p.

        The nucleus: in ascending order, what comes after a sum of probabilities of 1 - top_p, and
        the largest in any case. Values equal to the k-th stay. logits: [S, V] float32; top_k: [S]
        int32 from 1 to max_top_k; top_p: [S] float32 from 0 to 1; one of them may be None.
        Shaped like npu_top_k_top_p.
        """
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """Where the largest of each row is, the first of equals. [S, V] float32 -> [S] int64."""
        ...

    def draw(self, logits: Tensor, params: DrawParams, numbers: Tensor) -> Tensor:
        """Draw a token per row; see `kernels.drawing.draw`. All is on the host."""
        ...

    def queue(self) -> DeviceQueue:
        """A new queue of work for the device; the calling thread uses it."""
        ...

    def mark(self) -> Wait:
        """What waits until the device has done all that the calling thread has launched so far."""
        ...

    def set_lent_threads(self, flags: Sequence[int]) -> None:
        """Compute on one more thread per flag, while it is 0.

        flags: addresses of int32s, readable as long as the process lives; others write them.
        """
        ...

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """token_ids: [T] int32 or int64; weight: [V, H] -> [T, H]."""
        ...


def select_ops(
    name: str, npu: NpuOptions = DEFAULT_NPU_OPTIONS, cpu: CpuOptions = DEFAULT_CPU_OPTIONS
) -> Ops:
    """The backend called `name`: auto, reference, cpu or npu. npu, cpu: for these alone.

    `auto` takes cpu, else reference with a logged reason.

    Raises: ValueError: unknown name.
        RuntimeError: a backend asked for by name cannot be loaded; says why.
    """
    if name not in BACKENDS:
        raise ValueError(f"kernels backend {name!r} is not one of {', '.join(BACKENDS)}")
    if name == "reference":
        return ReferenceOps()
    if name == "npu":
        return _load_npu(npu)
    try:
        return load(cpu)
    except (BuildError, OSError) as error:
        if name == "cpu":
            raise RuntimeError(f"kernels backend cpu cannot be loaded: {error}") from error
        logger.warning("kernels: using the slow PyTorch reference, because %s", error)
        return ReferenceOps()


def _load_npu(options: NpuOptions) -> Ops:
    try:
        # NOTE: imported here because torch_npu exists on Ascend hosts alone.
        module = importlib.import_module("kernels.npu")
    except (ImportError, OSError) as error:
        raise RuntimeError(f"kernels backend npu cannot be loaded: {error}") from error
    ops: Ops = module.load(options)
    return ops
