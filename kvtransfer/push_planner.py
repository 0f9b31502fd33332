"""From pushed blocks to segments for a transport and to their checksums, for one link."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.checksum import HashedRuns
from kvtransfer.errors import TransferError
from kvtransfer.link import BlockCopy, RequestKey
from kvtransfer.rank_transfer import Push
from kvtransfer.registration import KVMemory, RegisteredRegion
from kvtransfer.reshard import Placement, Resharding, ReshardPlan
from kvtransfer.transports.base import Segment

Copies = tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class _Planned:
    """Of the same blocks in any layer."""

    hashed: HashedRuns
    plan: ReshardPlan
    ends: tuple[tuple[int, int], ...]
    """Per part, where its moves end in the source and in the target."""


class PushPlanner:
    """Knows the memory of both ends; used by the thread of the link."""

    def __init__(
        self, memory: KVMemory, regions: Sequence[RegisteredRegion], resharding: Resharding
    ):
        self._memory = memory
        self._regions = regions
        self._resharding = resharding
        self._last: tuple[tuple[RequestKey, Copies], _Planned] | None = None

    def segments(
        self, key: RequestKey, placement: Placement, batch: Sequence[Push]
    ) -> list[Segment]:
        """What a transport has to copy for all pushes of a batch.

        Raises: TransferError: a block outside of either end's memory, or a target that is cut into
        other blocks than the reader's.
        """
        if placement.block_size != self._resharding.target.block_size:
            raise TransferError(
                f"the blocks were reserved with {placement.block_size} tokens each, the reader has "
                f"{self._resharding.target}, the writer {self._resharding.source}"
            )
        segments = []
        num_parts = len(self._memory.layout.parts)
        for layer_idx, copies, _ in batch:
            planned = self._plan(key, placement, copies)
            for part_idx, moves in enumerate(planned.plan.moves):
                source = self._memory.regions[num_parts * layer_idx + part_idx]
                target_idx = self._resharding.target_layer + layer_idx
                target = self._regions[num_parts * target_idx + part_idx]
                source_end, target_end = planned.ends[part_idx]
                if source_end > source.num_bytes or target_end > target.num_bytes:
                    raise TransferError(f"block out of range in a push of layer {layer_idx}")
                from_address, to_address = source.base_address, target.base_address
                segments += [
                    Segment(from_address + source_offset, to_address + target_offset, num_bytes)
                    for source_offset, target_offset, num_bytes in moves
                ]
        return segments

    def checksums(
        self, key: RequestKey, placement: Placement, batch: Sequence[Push], every: int
    ) -> list[int]:
        """One per copy of the batch, in order; of one run in `every`, 0 for none."""
        if every == 0:
            return [0] * sum(len(push.copies) for push in batch)
        checksums = []
        for layer_idx, copies, _ in batch:
            hashed = self._plan(key, placement, copies).hashed
            checksums += hashed.checksums(self._memory, layer_idx, every)
        return checksums

    def _plan(self, key: RequestKey, placement: Placement, copies: Copies) -> _Planned:
        # The layers of a chunk push the same blocks, one after the other.
        if self._last is None or self._last[0] != (key, copies):
            copy_runs = [
                self._resharding.runs(placement, copy.block_index, copy.source_block_id)
                for copy in copies
            ]
            plan = self._resharding.plan(run for runs in copy_runs for run in runs)
            hashed = HashedRuns(
                [
                    [(run.source_slot, run.num_slots, run.place) for run in runs]
                    for runs in copy_runs
                ]
            )
            ends = tuple(
                (
                    max((move.source_offset + move.num_bytes for move in moves), default=0),
                    max((move.target_offset + move.num_bytes for move in moves), default=0),
                )
                for moves in plan.moves
            )
            self._last = (key, copies), _Planned(hashed, plan, ends)
        return self._last[1]
