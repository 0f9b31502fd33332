"""A step in two halves, so that collectives of one go on while the other is computed.

    rows       0 ....... cut ....... T        of each data-parallel rank
    halves     [   first   |  second  ]       about as many rows each

A cut is between two sequences where these are short; a long one may be cut in its middle, for its
second part reads the keys of its first from the cache, which the first half wrote before. A batch
of one row has a second half of one dummy row: ranks may differ, but all of them divide a step or
none does, as the leader's plan says.

Source: two-batch overlap of DeepSeek-V3 (arXiv 2412.19437), section 3.4.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch import MAX_DECODE_QUERIES, KVBatch
from engine.layers.attention import OnLayer
from engine.parallel_config import ParallelConfig


class Half(NamedTuple):
    """Input of one forward pass."""

    input_ids: Tensor
    positions: Tensor
    kv: KVBatch


def cut_of(cu_seqlens_q: Tensor) -> int:
    """Rows of the first half, at least one; all of them: the second half is a dummy row.

    cu_seqlens_q: [N + 1], see KVBatch.
    """
    starts: list[int] = cu_seqlens_q.tolist()
    middle = max(starts[-1] // 2, 1)
    before = max(start for start in starts if start <= middle)
    after = min(start for start in starts if start >= middle)
    if after - before > MAX_DECODE_QUERIES:
        return middle
    inner = [cut for cut in (before, after) if 0 < cut < starts[-1]]
    return min(inner, key=lambda cut: abs(2 * cut - starts[-1]), default=middle)


def plan_halves(cu_seqlens_q: Sequence[Tensor], config: ParallelConfig) -> Sequence[int]:
    """By data-parallel rank, dummy rows included -> rows of every first half; 0: the step is whole,
    on all ranks.
    """
    most = max(int(starts[-1]) for starts in cu_seqlens_q)
    if not config.dual_batch_overlap or most < config.dual_batch_min_rows:
        return [0] * len(cu_seqlens_q)
    return [cut_of(starts) for starts in cu_seqlens_q]


def largest_half(num_rows: Sequence[int], cuts: Sequence[int]) -> int:
    """Most rows of a half, of all data-parallel ranks."""
    return max(max(cut, n - cut) for cut, n in zip(cuts, num_rows, strict=True))


def halves_of(
    input_ids: Tensor, positions: Tensor, kv: KVBatch, cut: int
) -> tuple[Half, Half | None]:
    """The first `cut` rows and the others; None: there are none."""
    num_tokens = len(input_ids)
    assert 0 < cut <= num_tokens, f"a batch of {num_tokens} rows is cut at {cut}"
    starts = kv.cu_seqlens_q
    num_first = int((starts[:-1] < cut).sum())  # sequences that begin before the cut
    first_starts = starts[: num_first + 1].clamp(max=cut)
    missing = int(starts[num_first]) - cut  # rows of the last of them that the second half has
    contexts = kv.context_lens[:num_first].clone()
    contexts[-1] -= missing
    first = Half(
        input_ids[:cut],
        positions[:cut],
        _part(kv, slice(0, cut), slice(0, num_first), first_starts, contexts),
    )
    if cut == num_tokens:
        return first, None
    begin = num_first - 1 if missing else num_first
    rest = _part(
        kv,
        slice(cut, None),
        slice(begin, None),
        (starts[begin:] - cut).clamp(min=0),
        kv.context_lens[begin:],
    )
    return first, Half(input_ids[cut:], positions[cut:], rest)


def dummy_like(half: Half) -> Half:
    """One row that writes no KV, and reads block 0, whatever is there."""
    row = half.input_ids.new_zeros(1)
    kv = replace(
        half.kv,
        slot_mapping=half.kv.slot_mapping.new_full((1,), -1),
        block_table=half.kv.block_table.new_zeros(1, 1),
        cu_seqlens_q=torch.arange(2, dtype=torch.int32),
        context_lens=torch.ones(1, dtype=torch.int32),
        max_seqlen_q=1,
        num_decode_seqs=1,
        num_decode_tokens=1,
    )
    return Half(row, row, kv)


def on_layer_of_both(on_layer: OnLayer | None) -> OnLayer | None:
    """For each half to call: `on_layer` is called when both have written a layer's KV."""
    if on_layer is None:
        return None
    written: set[int] = set()

    def once_each(layer_idx: int) -> None:
        if layer_idx in written:
            on_layer(layer_idx)
        written.add(layer_idx)

    return once_each


def _part(kv: KVBatch, rows: slice, seqs: slice, starts: Tensor, contexts: Tensor) -> KVBatch:
    lengths = starts.diff()
    is_long = lengths > MAX_DECODE_QUERIES
    num_decodes = int(is_long.int().argmax()) if bool(is_long.any()) else len(lengths)
    return replace(
        kv,
        slot_mapping=kv.slot_mapping[rows],
        block_table=kv.block_table[seqs],
        cu_seqlens_q=starts,
        context_lens=contexts,
        max_seqlen_q=int(lengths.max()),
        num_decode_seqs=num_decodes,
        num_decode_tokens=int(starts[num_decodes]),
    )
