"""A random batch of sequences in a paged cache whose every unused float is NaN."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.kv_cache import KVCache
from kernels.ops import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedBatch:
    """Arguments of Ops.paged_attention."""

    q: Tensor
    k_cache: KVCache
    v_cache: KVCache
    block_table: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    scale: float
    window: int = 0

    def attend(self, ops: Ops) -> Tensor:
        return self.attend_with(ops, int(self.cu_seqlens_q.diff().max()))

    def attend_with(self, ops: Ops, max_seqlen_q: int) -> Tensor:
        return ops.paged_attention(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.cu_seqlens_q,
            self.context_lens,
            self.scale,
            max_seqlen_q,
            self.window,
        )

    def only(self, seq: int, num_queries: int, context_len: int) -> "PagedBatch":
        """The queries of one sequence that end at context_len, as a batch of its own."""
        last = int(self.cu_seqlens_q[seq + 1]) - (int(self.context_lens[seq]) - context_len)
        return PagedBatch(
            q=self.q[last - num_queries : last],
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            block_table=self.block_table[seq : seq + 1].contiguous(),
            cu_seqlens_q=torch.tensor([0, num_queries], dtype=torch.int32),
            context_lens=torch.tensor([context_len], dtype=torch.int32),
            scale=self.scale,
            window=self.window,
        )


def make_batch(
    sequences: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    seed: int = 0,
    window: int = 0,
) -> PagedBatch:
    """sequences: (queries, context length) of each."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for _, context in sequences]
    num_blocks = sum(counts) + 3
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    # Entries nobody may read are no valid block ids.
    block_table = torch.full((len(sequences), max(counts) + 1), 2**30, dtype=torch.int32)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    for seq, (_, context) in enumerate(sequences):
        for block in range(counts[seq]):
            block_id = free.pop()
            block_table[seq, block] = block_id
            filled = min(block_size, context - block * block_size)
            for cache in (k_cache, v_cache):
                cache[block_id, :, :filled] = torch.randn(
                    num_kv_heads, filled, head_dim, generator=generator
                )
    starts = torch.tensor([0, *(queries for queries, _ in sequences)]).cumsum(0)
    # Queries as the model hands them over: heads of a wider row.
    row = torch.randn(int(starts[-1]), num_heads + 2, head_dim, generator=generator)
    return PagedBatch(
        q=row[:, :num_heads],
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=block_table,
        cu_seqlens_q=starts.int(),
        context_lens=torch.tensor([context for _, context in sequences], dtype=torch.int32),
        scale=head_dim**-0.5,
        window=window,
    )


def with_common_prefixes(
    batch: PagedBatch, prefixes: Sequence[tuple[int, int, int]]
) -> tuple[PagedBatch, PagedBatch]:
    """Sequences that begin alike: in the same blocks, and in copies of them.

    prefixes: (sequence, which one it begins as, tokens in common), applied in this order; tokens
    are rounded down to blocks.
    """
    shared, (k_cache, v_cache) = _common_blocks(
        batch.block_table, (batch.k_cache, batch.v_cache), prefixes
    )
    return replace(batch, block_table=shared), replace(batch, k_cache=k_cache, v_cache=v_cache)


def _common_blocks(
    block_table: Tensor, caches: tuple[KVCache, KVCache], prefixes: Sequence[tuple[int, int, int]]
) -> tuple[Tensor, list[Tensor]]:
    """-> a table with the blocks in common, caches with copies for the table as it was."""
    shared, copies = block_table.clone(), []
    for cache in caches:
        assert isinstance(cache, Tensor)
        copies.append(cache.clone())
    for seq, elder, tokens in prefixes:
        count = tokens // copies[0].shape[2]
        shared[seq, :count] = shared[elder, :count]
        for copy in copies:
            copy[block_table[seq, :count].long()] = copy[block_table[elder, :count].long()]
    return shared, copies


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedMLABatch:
    """Arguments of the MLA attention ops."""

    q_nope: Tensor
    q_rope: Tensor
    w_uk: Tensor
    w_uv: Tensor
    latent_cache: KVCache
    rope_cache: KVCache
    block_table: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    scale: float
    tokens: list[tuple[Tensor, Tensor]]
    """Latents and ropes of each sequence, as they are in the cache."""

    def paging(self) -> tuple[KVCache, KVCache, Tensor, Tensor, Tensor, float, int]:
        return (
            self.latent_cache,
            self.rope_cache,
            self.block_table,
            self.cu_seqlens_q,
            self.context_lens,
            self.scale,
            int(self.cu_seqlens_q.diff().max()),
        )


def make_mla_batch(
    sequences: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    rank: int,
    rope: int,
    nope: int,
    v_dim: int,
    block_size: int,
) -> PagedMLABatch:
    """sequences: (queries, context length) of each."""
    latents = make_batch(
        sequences, num_heads=1, num_kv_heads=1, head_dim=rank, block_size=block_size
    )
    ropes = make_batch(sequences, num_heads=1, num_kv_heads=1, head_dim=rope, block_size=block_size)
    rope_cache = torch.full((*latents.k_cache.shape[:3], rope), torch.nan)
    tokens = []
    for seq, (_, context) in enumerate(sequences):
        count = -(-context // block_size)
        theirs, ours = (
            ropes.block_table[seq, :count].long(),
            latents.block_table[seq, :count].long(),
        )
        rope_cache[ours] = ropes.k_cache[theirs]
        tokens.append(
            (
                latents.k_cache[ours].flatten(0, 2)[:context],
                rope_cache[ours].flatten(0, 2)[:context],
            )
        )
    generator = torch.Generator().manual_seed(7)
    rows = int(latents.cu_seqlens_q[-1])
    q = torch.randn(rows, num_heads, nope + rope, generator=generator)
    return PagedMLABatch(
        q_nope=q[..., :nope],
        q_rope=q[..., nope:],
        w_uk=torch.randn(num_heads, nope, rank, generator=generator) / rank**0.5,
        w_uv=torch.randn(num_heads, rank, v_dim, generator=generator) / rank**0.5,
        latent_cache=latents.k_cache,
        rope_cache=rope_cache,
        block_table=latents.block_table,
        cu_seqlens_q=latents.cu_seqlens_q,
        context_lens=latents.context_lens,
        scale=(nope + rope) ** -0.5,
        tokens=tokens,
    )


def with_common_latents(
    batch: PagedMLABatch, prefixes: Sequence[tuple[int, int, int]]
) -> tuple[PagedMLABatch, PagedMLABatch]:
    """As `with_common_prefixes`; without `tokens`."""
    shared, (latents, ropes) = _common_blocks(
        batch.block_table, (batch.latent_cache, batch.rope_cache), prefixes
    )
    return (
        replace(batch, block_table=shared, tokens=[]),
        replace(batch, latent_cache=latents, rope_cache=ropes, tokens=[]),
    )


MIXED = [(1, 1), (1, 200), (300, 300), (2, 130), (70, 1000), (1, 513), (17, 64), (1, 128)]
"""Decode rows, whole prompts, chunks over a prefix; contexts around multiples of 32 and 128."""

RELATED = [
    (1, 900),
    (1, 700),
    (3, 400),
    (70, 1000),
    (1, 600),
    (2, 514),
    (1, 300),
    (8, 300),
    (1, 128),
    (70, 400),
    (1, 129),
    (1, 513),
]
"""Most of them begin as others do: see COMMON_PREFIXES."""
COMMON_PREFIXES = [
    (1, 0, 512),
    (2, 0, 300),
    (7, 1, 290),
    (8, 0, 128),
    (9, 0, 256),
    (10, 2, 128),
    (5, 4, 512),
    (6, 5, 270),
    (11, 0, 384),
]
"""Two families; some part from it within a tile of 128 keys, some at its end."""
