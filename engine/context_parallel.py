"""The rows of a step dealt out over context-parallel ranks, which hold the same weights and blocks.

    a prompt, two ranks     | 0 | 1 | 1 | 0 |     a row attends to all before it, so the first and
                                                  the last quarter cost what those between do
    a short prompt          whole, on the rank with fewest rows
    each layer              project the own rows --> write their KV --> AllGather of these rows of
                            the caches --> write the others' --> attend with the own rows
    all else                own rows alone; the states that somebody reads are gathered at the end

Every rank ends a step with the KV of all rows in its caches: the next chunk and prefix hits find
their context there, and any rank can push it. All ranks know the batch and deal it out alike, so
nobody asks another how many rows it has. Gathering suits paged caches and every kind of attention:
kernels see two sequences, of the first and the last part, on the same blocks. Narrow KV rows (few
heads, or latents) make it cheap.

Source: The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import MAX_DECODE_QUERIES, KVBatch
from engine.collectives import Group
from engine.layers.attention import OnLayer
from engine.parallel import Parallel
from kernels.kv_cache import KVCache, tensors_of

ForwardRows = Callable[[Tensor, Tensor, KVBatch, OnLayer | None], Tensor]
"""(input_ids [T], positions [T], kv, on_layer) -> [T, hidden_size]."""

_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring tokens of one sequence: [start, stop) of those that the step computes."""

    sequence: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def deal(seqlens: Sequence[int], size: int, min_tokens: int) -> list[list[Piece]]:
    """What each of `size` ranks computes, in the order of the batch; a rank may have nothing.

    seqlens: tokens of each sequence. Those with fewer than min_tokens are not split.
    """
    dealt: list[list[Piece]] = [[] for _ in range(size)]
    num_rows = [0] * size

    def give(rank: int, piece: Piece) -> None:
        dealt[rank].append(piece)
        num_rows[rank] += len(piece)

    short = []
    for sequence, length in enumerate(seqlens):
        if length < min_tokens:
            short.append(Piece(sequence, 0, length))
            continue
        bounds = [length * i // (2 * size) for i in range(2 * size + 1)]
        for rank in range(size - 1):
            for chunk in (rank, 2 * size - 1 - rank):
                give(rank, Piece(sequence, bounds[chunk], bounds[chunk + 1]))
        give(size - 1, Piece(sequence, bounds[size - 1], bounds[size + 1]))
    for piece in sorted(short, key=len, reverse=True):
        give(num_rows.index(min(num_rows)), piece)
    return [
        sorted((p for p in pieces if len(p)), key=lambda p: (p.sequence, p.start))
        for pieces in dealt
    ]


def rows_by_rank(cu_seqlens_q: Tensor, size: int, min_tokens: int) -> list[int]:
    """How many rows each rank computes, the dummy row of a rank that has none included."""
    dealt = deal(cu_seqlens_q.diff().tolist(), size, min_tokens)
    return [max(1, sum(map(len, pieces))) for pieces in dealt]


class ContextParallel:
    """Runs a model of this rank on its part of every step; one per model."""

    def __init__(self, parallel: Parallel) -> None:
        self._group = parallel.cp
        self._min_tokens = parallel.config.cp_min_tokens
        self._step = parallel.step

    def run(
        self,
        forward: ForwardRows,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVBatch,
        on_layer: OnLayer | None,
    ) -> Tensor:
        """input_ids, positions: [T], of all rows -> [T, hidden_size], zeros where nobody reads."""
        group = self._group
        starts = kv.cu_seqlens_q.numpy()
        dealt = deal(np.diff(starts).tolist(), group.size, self._min_tokens)
        rows = [_rows(pieces, starts) for pieces in dealt]
        own, pieces = rows[group.rank], dealt[group.rank]
        others = _Exchange(group, rows, kv)
        # NOTE: a rank without rows has to take part: it computes the first one, and writes nothing.
        computed = own if len(own) else np.zeros(1, np.int64)
        part = _part(kv, pieces or [Piece(0, 0, 1)], computed, others)
        if not len(own):
            part = replace(part, slot_mapping=torch.full_like(part.slot_mapping, -1))
        index = torch.from_numpy(computed).to(input_ids.device)
        hidden = forward(input_ids[index], positions[index], part, on_layer)
        return self._collect(hidden, rows, len(input_ids))

    def _collect(self, hidden: Tensor, rows: Sequence[_Rows], num_rows: int) -> Tensor:
        """This rank's states -> those of all rows that are wanted, on every rank."""
        group, wanted = self._group, np.arange(num_rows)
        if self._step.wanted_rows is not None:
            wanted = self._step.wanted_rows.cpu().numpy().astype(np.int64)
        out = hidden.new_zeros(num_rows, hidden.shape[1])
        if not len(wanted):
            return out
        # Of each rank: which of its rows are wanted, and where these go.
        found = [np.flatnonzero(np.isin(of_rank, wanted)) for of_rank in rows]
        most = max(map(len, found))
        own = hidden[torch.from_numpy(found[group.rank]).to(hidden.device)]
        gathered = group.all_gather(_padded(own, most)).view(group.size, most, -1)
        for of_rank, places, states in zip(rows, found, gathered, strict=True):
            out[torch.from_numpy(of_rank[places]).to(out.device)] = states[: len(places)]
        return out


class _Exchange:
    """Implements engine.batch.OtherRows for one step."""

    def __init__(self, group: Group, rows: Sequence[_Rows], kv: KVBatch) -> None:
        self._group = group
        self._most = max(map(len, rows))
        ranks = [rank for rank in range(group.size) if rank != group.rank]
        taken = [rank * self._most + np.arange(len(rows[rank])) for rank in ranks]
        device = kv.slot_mapping.device
        self._taken = torch.from_numpy(np.concatenate(taken)).to(device)
        block_size = kv.k_caches[0].shape[2]

        def places(chosen: _Rows) -> tuple[Tensor, Tensor]:
            slots = kv.slot_mapping[torch.from_numpy(chosen).to(device)].long()
            return slots // block_size, slots % block_size

        self._own = places(rows[group.rank])
        self._others = places(np.concatenate([rows[rank] for rank in ranks]))

    def fetch(self, k_cache: KVCache, v_cache: KVCache) -> None:
        """See OtherRows. Rows travel as they are stored, so all caches have the same bits."""
        for caches in zip(tensors_of(k_cache), tensors_of(v_cache), strict=True):
            tensors = [tensor for tensor in caches if tensor is not None]
            if tensors:
                self._fetch(tensors)

    def _fetch(self, tensors: Sequence[Tensor]) -> None:
        """Of tensors [num_blocks, num_kv_heads, block_size, width] of the same dtype."""
        block_ids, offsets = self._own
        own = torch.cat([tensor[block_ids, :, offsets] for tensor in tensors], dim=-1)
        rows = self._group.all_gather(_padded(own, self._most))[self._taken]
        block_ids, offsets = self._others
        widths = [tensor.shape[3] for tensor in tensors]
        for tensor, part in zip(tensors, torch.split(rows, widths, dim=-1), strict=True):
            tensor[block_ids, :, offsets] = part


def _rows(pieces: Sequence[Piece], starts: npt.NDArray[np.int32]) -> _Rows:
    """Numbers of these rows in the batch, ascending."""
    found = [np.arange(p.start, p.stop) + starts[p.sequence] for p in pieces]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _part(kv: KVBatch, pieces: Sequence[Piece], rows: _Rows, others: _Exchange) -> KVBatch:
    """These rows as a batch: each piece a sequence that ends with its last row."""
    device = kv.slot_mapping.device
    sequences = torch.tensor([p.sequence for p in pieces])
    stops = torch.tensor([p.stop for p in pieces], dtype=torch.int32)
    lengths = [len(p) for p in pieces]
    starts = np.zeros(len(pieces) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    before = kv.context_lens - kv.cu_seqlens_q.diff()
    is_long = np.array(lengths) > MAX_DECODE_QUERIES
    num_decodes = int(is_long.argmax()) if is_long.any() else len(pieces)
    return replace(
        kv,
        slot_mapping=kv.slot_mapping[torch.from_numpy(rows).to(device)],
        block_table=kv.block_table[sequences.to(device)],
        cu_seqlens_q=torch.from_numpy(starts),
        context_lens=before[sequences] + stops,
        max_seqlen_q=max(lengths),
        num_decode_seqs=num_decodes,
        num_decode_tokens=int(starts[num_decodes]),
        others=others,
    )


def _padded(x: Tensor, num_rows: int) -> Tensor:
    """x [n, ...] -> [num_rows, ...], zeros at the tail."""
    return functional.pad(x, (0, 0) * (x.dim() - 1) + (0, num_rows - len(x)))
