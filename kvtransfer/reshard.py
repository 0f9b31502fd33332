"""Which bytes of a writer's blocks go where in a reader's blocks: a pure function of two layouts
and two lists of blocks.

Positions are offsets within a part (see layout.py), equal for all layers, so one plan serves every
layer.

Heads: rank r of tp_size T holds heads [r H / T, (r + 1) H / T) of the model's H; where T exceeds H,
T / H ranks hold the same head. A target rank takes a replicated head from exactly one source rank,
number (target rank modulo replicas) of those that hold it, so that the plans of all source ranks
together write every byte of the target once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtransfer.layout import DTYPE_BYTES, KVLayout


class Move(NamedTuple):
    """One run of bytes, in offsets from the start of the part on either side."""

    source_offset: int
    target_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Per part the moves, by ascending target offset, with adjacent runs joined."""

    moves: tuple[tuple[Move, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that one layer moves."""
        return sum(move.num_bytes for part in self.moves for move in part)


def find_mismatch(source: KVLayout, target: KVLayout) -> str:
    """Why KV of one cannot become KV of the other; empty if it can."""
    for name, ours, theirs in (
        ("dtype", source.dtype, target.dtype),
        ("weights", source.weights, target.weights),
        ("num_layers", source.num_layers, target.num_layers),
        ("head_dim", source.head_dim, target.head_dim),
        ("kv_lora_rank", source.kv_lora_rank, target.kv_lora_rank),
        ("rope_dim", source.rope_dim, target.rope_dim),
        ("total_num_kv_heads", source.num_model_heads, target.num_model_heads),
    ):
        if ours != theirs:
            return f"{name} differs: writer {ours}, reader {theirs}"
    return ""


def plan_transfer(
    source: KVLayout,
    target: KVLayout,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    num_tokens: int | None = None,
) -> ReshardPlan:
    """Plan the copy of num_tokens tokens that start at the first token of both lists of blocks.

    num_tokens defaults to what the shorter side holds. Empty parts mean that another source rank
    owns the heads.
    Raises: ValueError: layouts that cannot be resharded, a target block given twice, or too few
    blocks for num_tokens.
    """
    if mismatch := find_mismatch(source, target):
        raise ValueError(f"{mismatch}; writer has {source}, reader has {target}")
    if len(set(target_blocks)) != len(target_blocks):
        raise ValueError("a target block is given twice")
    capacity = min(
        len(source_blocks) * source.block_size,
        len(target_blocks) * target.block_size,
    )
    if num_tokens is None:
        num_tokens = capacity
    if num_tokens > capacity:
        raise ValueError(f"num_tokens is {num_tokens}, the blocks hold {capacity}")
    parts = []
    for source_part in source.parts:
        if source == target and num_tokens == len(target_blocks) * target.block_size:
            block_bytes = source.part_block_bytes(source_part)
            moves: Iterator[Move] = (
                Move(source_block * block_bytes, target_block * block_bytes, block_bytes)
                for source_block, target_block in zip(source_blocks, target_blocks, strict=False)
            )
        else:
            token_bytes = source_part.width * DTYPE_BYTES[source.dtype]
            moves = (
                Move(
                    source_offset=_offset(source, source_blocks, source_head, token) * token_bytes,
                    target_offset=_offset(target, target_blocks, target_head, token) * token_bytes,
                    num_bytes=num * token_bytes,
                )
                for source_head, target_head in _shared_heads(source, target)
                for token, num in _token_runs(source.block_size, target.block_size, num_tokens)
            )
        parts.append(_joined(moves))
    return ReshardPlan(tuple(parts))


def _heads(layout: KVLayout) -> range:
    """Model heads that this rank holds."""
    total, size, rank = layout.num_model_heads, layout.tp_size, layout.tp_rank
    if layout.kv_lora_rank:
        return range(1)
    if size >= total:
        if size % total:
            raise ValueError(f"tp_size {size} is not a multiple of {total} KV heads")
        first = rank // (size // total)
        return range(first, first + 1)
    if total % size:
        raise ValueError(f"{total} KV heads are not a multiple of tp_size {size}")
    return range(rank * (total // size), (rank + 1) * (total // size))


def _shared_heads(source: KVLayout, target: KVLayout) -> Iterator[tuple[int, int]]:
    """Pairs of (source head, target head), local indices, that this source rank has to write."""
    source_heads, target_heads = _heads(source), _heads(target)
    for layout, heads in ((source, source_heads), (target, target_heads)):
        if not layout.kv_lora_rank and layout.num_kv_heads != len(heads):
            raise ValueError(f"{layout} should hold {len(heads)} KV heads")
    num_replicas = max(1, source.tp_size // source.num_model_heads)
    if source.tp_rank % num_replicas != target.tp_rank % num_replicas:
        return
    for head in target_heads:
        if head in source_heads:
            yield head - source_heads.start, head - target_heads.start


def _token_runs(source_size: int, target_size: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """(first token, count) of the longest runs that cross no block boundary on either side."""
    token = 0
    while token < num_tokens:
        end = min(
            (token // source_size + 1) * source_size,
            (token // target_size + 1) * target_size,
            num_tokens,
        )
        yield token, end - token
        token = end


def _offset(layout: KVLayout, blocks: Sequence[int], head: int, token: int) -> int:
    """Position of a token of a head within its part, in tokens."""
    num_heads = layout.parts[0].num_heads
    block = blocks[token // layout.block_size]
    return (block * num_heads + head) * layout.block_size + token % layout.block_size


def _joined(moves: Iterator[Move]) -> tuple[Move, ...]:
    joined: list[Move] = []
    for move in sorted(moves, key=lambda move: move.target_offset):
        if joined:
            last = joined[-1]
            if (
                last.target_offset + last.num_bytes == move.target_offset
                and last.source_offset + last.num_bytes == move.source_offset
            ):
                joined[-1] = last._replace(num_bytes=last.num_bytes + move.num_bytes)
                continue
        joined.append(move)
    return tuple(joined)
