"""The tensors that captured graphs read, one set for graphs of all sizes.

A graph of N rows has room for N sequences. A batch of n sequences with T rows lies in it as

    sequences   n of the batch | N - T of padding, a row each | T - n without rows
    rows        T of the batch | N - T of padding             |

so the numbers of rows of sequences are data, and drafts need no graphs of their own.
"""

import torch
from torch import Tensor

from engine.batch import Batch, KVBatch
from engine.runner import ForwardMemory


class StaticBatch:
    """Written before every replay."""

    def __init__(
        self, memory: ForwardMemory, max_num_rows: int, *, has_host_lengths: bool, is_ragged: bool
    ) -> None:
        """has_host_lengths: see `GraphBackend`. is_ragged: sequences may have several rows."""
        device = memory.k_caches[0].device
        lengths = torch.device("cpu") if has_host_lengths else device

        def filled(value: int, *shape: int, device: torch.device = device) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        self._is_ragged = is_ragged
        self._caches = (memory.k_caches, memory.v_caches)
        self._input_ids, self._positions = (filled(0, max_num_rows) for _ in range(2))
        # A capture runs the model: its rows are padding, which sees one key and writes nothing.
        self._slots = filled(-1, max_num_rows)
        self._contexts = filled(1, max_num_rows, device=lengths)
        self._table = filled(0, max_num_rows, memory.max_blocks)
        self._numbers = torch.arange(max_num_rows + 1, dtype=torch.int32, device=lengths)
        self._starts = self._numbers.clone()

    def of(self, size: int) -> Batch:
        """A batch of `size` decodes; the same tensors each time."""
        kv = KVBatch(
            *self._caches,
            slot_mapping=self._slots[:size],
            block_table=self._table[:size],
            cu_seqlens_q=self._starts[: size + 1],
            context_lens=self._contexts[:size],
            max_seqlen_q=1,
            num_decode_seqs=size,
            num_decode_tokens=size,
        )
        return Batch(self._input_ids[:size], self._positions[:size], kv, self._numbers[:size])

    def fill(self, batch: Batch, size: int) -> None:
        """Copy a batch in. Rows from its end up to `size` see one key and write nothing."""
        num_rows, kv = len(batch.input_ids), batch.kv
        num_seqs = len(kv.context_lens)
        self._input_ids[:num_rows] = batch.input_ids
        self._positions[:num_rows] = batch.positions
        self._slots[:num_rows] = kv.slot_mapping
        self._contexts[:num_seqs].copy_(kv.context_lens, non_blocking=True)
        width = min(kv.block_table.shape[1], self._table.shape[1])
        self._table[:num_seqs, :width] = kv.block_table[:, :width]
        end = num_seqs + size - num_rows
        if num_rows < size:
            self._input_ids[num_rows:size] = 0
            self._positions[num_rows:size] = 0
            self._slots[num_rows:size] = -1
            self._contexts[num_seqs:end] = 1
            self._table[num_seqs:end, 0] = 0
        if self._is_ragged:
            self._starts[: num_seqs + 1] = kv.cu_seqlens_q
            self._starts[num_seqs + 1 : end + 1] = self._numbers[num_rows + 1 : size + 1]
            self._starts[end + 1 : size + 1] = size
            self._contexts[end:size] = 0
