"""Which bytes of a writer's blocks go where in a reader's blocks: a pure function of two layouts
and two lists of blocks.

A slot is one token of one head within a part (see layout.py). All parts of all layers have the same
slots and differ only in the bytes of one, so one plan serves them all.

Heads: rank r of tp_size T holds heads [r H / T, (r + 1) H / T) of the model's H; where T exceeds H,
T / H ranks hold the same head. A target rank takes a replicated head from exactly one source rank,
number (target rank modulo replicas) of those that hold it, so that the plans of all source ranks
together write every byte of the target once.

Layers: a source rank holds some of the model's, or all; a target holds all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtransfer.layout import KVLayout


class Move(NamedTuple):
    """One run of bytes, in offsets from the start of the part on either side."""

    source_offset: int
    target_offset: int
    num_bytes: int


class SlotRun(NamedTuple):
    """Neighbouring slots of one block that are neighbours in the other side's block too."""

    source_slot: int
    target_slot: int
    num_slots: int
    place: int
    """Of the first slot in the target's reservation, whatever its block ids: names the run."""


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """Per part the moves, by ascending target offset, with adjacent runs joined."""

    moves: tuple[tuple[Move, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that one layer moves."""
        return sum(move.num_bytes for part in self.moves for move in part)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a reader wants the tokens of a prompt: block_ids[i] takes its block first_block + i."""

    block_ids: tuple[int, ...]
    first_block: int
    block_size: int
    """Tokens of a block of the reader."""
    end_token: int
    """Tokens of the prompt, counted from its first, that are wanted; at most what the blocks
    hold.
    """

    @classmethod
    def of(
        cls,
        block_ids: Sequence[int],
        first_block: int,
        num_tokens: int,
        *,
        block_size: int,
        source_block_size: int,
    ) -> "Placement":
        """Where the first num_tokens of a prompt go; 0 stands for all that the blocks hold.

        Between equal block sizes whole blocks are wanted, which makes fewer and longer runs.
        """
        end_token = (first_block + len(block_ids)) * block_size
        if num_tokens and source_block_size != block_size:
            end_token = min(num_tokens, end_token)
        return cls(tuple(block_ids), first_block, block_size, end_token)


@dataclass(frozen=True, slots=True)
class Resharding:
    """How blocks of one source rank become blocks of one target rank; made by `between`."""

    source: KVLayout
    target: KVLayout
    source_head: int
    """First local head of the source that the target takes from it."""
    target_head: int
    num_heads: int
    """Neighbouring heads on both sides; 0: other ranks write this target."""

    @property
    def target_layer(self) -> int:
        """Layer of the target that the source's first one goes to."""
        return self.source.first_layer

    @classmethod
    def between(cls, source: KVLayout, target: KVLayout) -> "Resharding":
        """Raises: ValueError: layouts that cannot be resharded, with both in the message."""
        if mismatch := find_mismatch(source, target):
            raise ValueError(f"{mismatch}; writer has {source}, reader has {target}")
        source_heads, target_heads = _heads(source), _heads(target)
        num_replicas = max(1, source.tp_size // source.num_model_heads)
        first = max(source_heads.start, target_heads.start)
        num_heads = max(min(source_heads.stop, target_heads.stop) - first, 0)
        if source.tp_rank % num_replicas != target.tp_rank % num_replicas:
            num_heads = 0
        return cls(
            source, target, first - source_heads.start, first - target_heads.start, num_heads
        )

    def source_blocks(self, placement: Placement) -> range:
        """Numbers of the writer's blocks of the prompt that hold what the placement wants."""
        if not self.num_heads or not placement.block_ids:
            return range(0)
        first_token = placement.first_block * placement.block_size
        size = self.source.block_size
        return range(first_token // size, -(-placement.end_token // size))

    def runs(
        self, placement: Placement, block_index: int, source_block_id: int = 0
    ) -> list[SlotRun]:
        """Split the writer's block number block_index of the prompt into runs.

        Both ends split it alike; the reader needs no source_block_id for the target's side.
        """
        source_size, target_size = self.source.block_size, self.target.block_size
        token = max(block_index * source_size, placement.first_block * target_size)
        end_token = min((block_index + 1) * source_size, placement.end_token)
        runs = []
        while token < end_token:
            index, target_slot = divmod(token, target_size)
            index -= placement.first_block
            num_tokens = min(end_token - token, target_size - target_slot)
            source_slot = token % source_size
            # Where a run is a whole block on both sides, the heads follow each other on both.
            is_whole = num_tokens == source_size == target_size
            step = self.num_heads if is_whole else 1
            for head in range(0, self.num_heads, step):
                target_head = self.target_head + head
                source_row = source_block_id * self.source.num_heads + self.source_head + head
                target_row = placement.block_ids[index] * self.target.num_heads + target_head
                place = (index * self.target.num_heads + target_head) * target_size + target_slot
                runs.append(
                    SlotRun(
                        source_row * source_size + source_slot,
                        target_row * target_size + target_slot,
                        step * num_tokens,
                        place,
                    )
                )
            token += num_tokens
        return runs

    def plan(self, runs: Iterable[SlotRun]) -> ReshardPlan:
        """Join runs and turn them into bytes of each part."""
        joined = _joined(runs)
        return ReshardPlan(
            tuple(
                tuple(
                    Move(source * size, target * size, num * size) for source, target, num in joined
                )
                for size in (part.slot_bytes for part in self.source.parts)
            )
        )


def find_mismatch(source: KVLayout, target: KVLayout) -> str:
    """Why KV of one cannot become KV of the other; empty if it can."""
    for name, ours, theirs in (
        ("dtype", source.dtype, target.dtype),
        ("weights", source.weights, target.weights),
        ("scale_dtype", source.scale_dtype, target.scale_dtype),
        ("num_layers", source.num_model_layers, target.num_layers),
        ("head_dim", source.head_dim, target.head_dim),
        ("kv_lora_rank", source.kv_lora_rank, target.kv_lora_rank),
        ("rope_dim", source.rope_dim, target.rope_dim),
        ("total_num_kv_heads", source.num_model_heads, target.num_model_heads),
    ):
        if ours != theirs:
            return f"{name} differs: writer {ours}, reader {theirs}"
    return ""


def find_writers(source: KVLayout, target: KVLayout) -> frozenset[int]:
    """Ranks of the source's engine that together write every byte of this target rank, by their
    KVLayout.engine_rank.

    Raises: ValueError: layouts that cannot be resharded.
    """
    return frozenset(
        stage * source.tp_size + rank
        for stage in range(source.pp_size)
        for rank in range(source.tp_size)
        if Resharding.between(source.for_rank(rank, source.tp_size), target).num_heads
    )


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
    resharding = Resharding.between(source, target)
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
    placement = Placement(tuple(target_blocks), 0, target.block_size, num_tokens)
    return resharding.plan(
        run
        for block_index in resharding.source_blocks(placement)
        for run in resharding.runs(placement, block_index, source_blocks[block_index])
    )


def _heads(layout: KVLayout) -> range:
    """Model heads that this rank holds."""
    total, size, rank = layout.num_model_heads, layout.tp_size, layout.tp_rank
    if not 0 <= rank < size:
        raise ValueError(f"tp_rank is {rank}, tp_size is {size}")
    if layout.kv_lora_rank:
        return range(1)
    if size >= total:
        if size % total:
            raise ValueError(f"tp_size {size} is not a multiple of {total} KV heads")
        first = rank // (size // total)
        heads = range(first, first + 1)
    elif total % size:
        raise ValueError(f"{total} KV heads are not a multiple of tp_size {size}")
    else:
        heads = range(rank * (total // size), (rank + 1) * (total // size))
    if layout.num_kv_heads != len(heads):
        raise ValueError(f"{layout} should hold {len(heads)} KV heads")
    return heads


def _joined(runs: Iterable[SlotRun]) -> list[tuple[int, int, int]]:
    """(source slot, target slot, count), by target slot, longest runs."""
    joined: list[tuple[int, int, int]] = []
    for source, target, num, _ in sorted(runs, key=lambda run: run.target_slot):
        if joined:
            last_source, last_target, last_num = joined[-1]
            if last_target + last_num == target and last_source + last_num == source:
                joined[-1] = (last_source, last_target, last_num + num)
                continue
        joined.append((source, target, num))
    return joined
