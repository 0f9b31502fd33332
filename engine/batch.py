"""The flat batch of one step: all requests' tokens back to back, and where their KV lives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.block_table import BlockTable, GrowableArray, Int32s, MakeInts, plain_ints
from engine.request import Request
from engine.scheduler_output import ScheduledRequest
from kernels.device_queue import DeviceQueue
from kernels.kv_cache import KVCache

MAX_DECODE_QUERIES = 8
"""A sequence with this many tokens in a step, or fewer, is computed as a decode."""


class OtherRows(Protocol):
    """Rows of this step that other ranks compute for the same sequences."""

    def fetch(self, k_cache: KVCache, v_cache: KVCache) -> None:
        """Write their keys and values of one layer; this rank's own are in its caches."""
        ...


@dataclass(frozen=True, slots=True)
class KVBatch:
    """The paged KV of all layers and this step's place in it: T tokens, N sequences, in int32."""

    k_caches: Sequence[KVCache]
    """One a layer: [num_blocks, num_kv_heads, block_size, head_dim], in floats or in int8."""
    v_caches: Sequence[KVCache]
    """As k_caches."""
    slot_mapping: Tensor
    """[T]: block_id * block_size + offset of each token; -1 skips the write."""
    block_table: Tensor
    """[N, max_blocks]: blocks of each sequence in order; entries past its context are arbitrary."""
    cu_seqlens_q: Tensor
    """[N + 1]: where each sequence's tokens start."""
    context_lens: Tensor
    """[N]: keys of each sequence, this step's included."""
    max_seqlen_q: int
    """Most tokens of one sequence."""
    num_decode_seqs: int
    """Leading sequences with at most MAX_DECODE_QUERIES tokens: nothing but decodes, as a rule."""
    num_decode_tokens: int
    """Tokens of these."""
    active: Tensor | None = None
    """[rows between two blocks] bool: tokens, and behind them padding; None: nobody asks."""
    others: OtherRows | None = None
    """None: these are all rows of the step."""

    def complete(self, k_cache: KVCache, v_cache: KVCache) -> None:
        """Fetch what attention reads of the step besides this rank's own rows, of one layer."""
        if self.others is not None:
            self.others.fetch(k_cache, v_cache)

    def split(self, num_seqs: int, num_tokens: int) -> "tuple[KVBatch, KVBatch]":
        """The first num_seqs sequences, which have num_tokens tokens, and the others."""
        first = replace(
            self,
            slot_mapping=self.slot_mapping[:num_tokens],
            block_table=self.block_table[:num_seqs],
            cu_seqlens_q=self.cu_seqlens_q[: num_seqs + 1],
            context_lens=self.context_lens[:num_seqs],
            max_seqlen_q=min(self.max_seqlen_q, MAX_DECODE_QUERIES),
            active=None,
        )
        second = replace(
            self,
            slot_mapping=self.slot_mapping[num_tokens:],
            block_table=self.block_table[num_seqs:],
            cu_seqlens_q=self.cu_seqlens_q[num_seqs:] - num_tokens,
            context_lens=self.context_lens[num_seqs:],
            num_decode_seqs=0,
            num_decode_tokens=0,
            active=None,
        )
        return first, second


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one model forward."""

    input_ids: Tensor
    """[T] int32."""
    positions: Tensor
    """[T] int32."""
    kv: KVBatch
    sample_rows: Tensor
    """[R] int32: the last tokens of each sequence that samples, in order; see `Span`."""
    has_adapters: bool = False
    """Whether rows are computed with adapters."""
    needs_all_rows: bool = False
    """Whether the results of other rows than these are read: log-probabilities of the prompt."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence that a step computes."""

    request: Request
    start: int
    """Position of the first one."""
    token_ids: Sequence[int]
    num_samples: int
    """How many of the last ones logits are wanted of."""

    @classmethod
    def of(cls, entry: ScheduledRequest) -> "Span":
        """The next tokens of a scheduled request, and its drafts; 0 for tokens still unknown."""
        request = entry.request
        token_ids = request.token_ids[entry.start : entry.stop]
        return cls(
            request,
            entry.start,
            token_ids + [0] * entry.num_unknown + entry.draft_token_ids,
            1 + entry.num_drafts if entry.samples else 0,
        )


class BatchBuilder:
    """Lays scheduled requests out as a `Batch`; its tensors are valid until the next `build`.

    Its buffers stay, and what did not change since the last batch is not written again.
    """

    def __init__(
        self,
        k_caches: Sequence[KVCache],
        v_caches: Sequence[KVCache],
        block_size: int,
        queue: DeviceQueue | None = None,
    ) -> None:
        """queue: for batches that are brought to the device while it runs what came before."""
        make_ints: MakeInts = plain_ints if queue is None else queue.host_ints
        self._k_caches = k_caches
        self._v_caches = v_caches
        self._block_size = block_size
        self._device = next((cache.device for cache in k_caches), torch.device("cpu"))
        self._queue = queue
        self._tokens, self._positions, self._slots = (
            GrowableArray(2048, make_ints) for _ in range(3)
        )
        self._starts, self._contexts, self._samples = (
            GrowableArray(65, make_ints) for _ in range(3)
        )
        self._table = BlockTable(make_ints)

    def build(self, scheduled: Sequence[ScheduledRequest]) -> Batch:
        """Lay out the next `num_tokens` tokens of each request, which holds their blocks."""
        return self.build_spans([Span.of(entry) for entry in scheduled])

    def build_spans(self, spans: Sequence[Span]) -> Batch:
        """The same for tokens of any choice."""
        n, size = len(spans), self._block_size
        computed = np.fromiter((s.start for s in spans), np.int32, n)
        seqlens = np.fromiter((len(s.token_ids) for s in spans), np.int32, n)
        starts = self._starts.take(n + 1)
        starts[0] = 0
        np.cumsum(seqlens, out=starts[1:])
        contexts = self._contexts.take(n)
        np.add(computed, seqlens, out=contexts)

        num_tokens = int(starts[-1])
        positions = self._positions.take(num_tokens)
        positions[:] = np.arange(num_tokens, dtype=np.int32)
        positions += np.repeat(computed - starts[:-1], seqlens)
        table, table_tensor = self._block_table(spans, -(-contexts // size))
        slots = self._slots.take(num_tokens)
        rows = np.repeat(np.arange(n, dtype=np.int32), seqlens)
        slots[:] = table[rows, positions // size] * size + positions % size

        is_long = seqlens > MAX_DECODE_QUERIES
        num_decodes = int(is_long.argmax()) if is_long.any() else n
        num_samples = np.fromiter((s.num_samples for s in spans), np.int32, n)
        ends = np.cumsum(num_samples, dtype=np.int32)
        sample_rows = self._samples.take(int(ends[-1]))
        sample_rows[:] = np.arange(len(sample_rows), dtype=np.int32)
        sample_rows += np.repeat(starts[1:] - ends, num_samples)
        kv = KVBatch(
            k_caches=self._k_caches,
            v_caches=self._v_caches,
            slot_mapping=self._placed(self._slots.tensor(num_tokens)),
            block_table=self._placed(table_tensor),
            cu_seqlens_q=self._starts.tensor(n + 1),
            context_lens=self._contexts.tensor(n),
            max_seqlen_q=int(seqlens.max()),
            num_decode_seqs=num_decodes,
            num_decode_tokens=int(starts[num_decodes]),
        )
        self._fill_token_ids(spans, starts)
        return Batch(
            input_ids=self._placed(self._tokens.tensor(num_tokens)),
            positions=self._placed(self._positions.tensor(num_tokens)),
            kv=kv,
            sample_rows=self._placed(self._samples.tensor(len(sample_rows))),
            has_adapters=any(span.request.adapter for span in spans),
            needs_all_rows=any(
                span.request.sampling.num_prompt_logprobs is not None for span in spans
            ),
        )

    def dummy(self) -> Batch:
        """One row that writes no KV and samples nothing, for a rank that must take part in a step.

        It reads block 0, whatever is there.
        """
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        kv = KVBatch(
            k_caches=self._k_caches,
            v_caches=self._v_caches,
            slot_mapping=self._placed(torch.from_numpy(-one)),
            block_table=self._placed(torch.from_numpy(zero[None])),
            cu_seqlens_q=torch.from_numpy(np.arange(2, dtype=np.int32)),
            context_lens=torch.from_numpy(one),
            max_seqlen_q=1,
            num_decode_seqs=1,
            num_decode_tokens=1,
        )
        return Batch(
            input_ids=self._placed(torch.from_numpy(zero)),
            positions=self._placed(torch.from_numpy(zero)),
            kv=kv,
            sample_rows=self._placed(torch.from_numpy(zero[:0])),
        )

    def _placed(self, values: Tensor) -> Tensor:
        """Where the caches are; lengths stay on the host, since devices read them there."""
        return values.to(self._device) if self._queue is None else self._queue.to_device(values)

    def _fill_token_ids(self, spans: Sequence[Span], starts: Int32s) -> None:
        token_ids = self._tokens.take(int(starts[-1]))
        for start, span in zip(starts.tolist(), spans, strict=False):
            token_ids[start : start + len(span.token_ids)] = span.token_ids

    def _block_table(self, spans: Sequence[Span], num_blocks: Int32s) -> tuple[Int32s, Tensor]:
        counts = num_blocks.tolist()
        for span, count in zip(spans, counts, strict=True):
            assert count <= len(span.request.block_ids), f"{span.request.key} lacks blocks"
        return self._table.fill([span.request.block_ids for span in spans], counts)
