"""Whether what one writer rank has written into a reservation is what it says it sent."""

import time
from collections.abc import Callable, Sequence

from kvtransfer.checksum import HashedRun, HashedRuns
from kvtransfer.registration import KVMemory
from kvtransfer.reshard import Placement, Resharding

LANDING_POLL_S = 0.005


class Verification:
    """Used by one thread at a time.

    Layers that a writer reports while it still writes others are checked then; what the end says
    counts, and only layers for which it says the same are not hashed again.
    """

    def __init__(self, memory: KVMemory, resharding: Resharding, placement: Placement):
        runs: list[HashedRun] = [
            (run.target_slot, run.num_slots, run.place)
            for block_index in resharding.source_blocks(placement)
            for run in resharding.runs(placement, block_index)
        ]
        self._memory = memory
        self._first_layer = resharding.target_layer
        self._num_layers = resharding.source.num_layers
        self._runs = HashedRuns([runs])
        self._right: dict[int, tuple[int, int]] = {}
        """By layer: checksum that was right, and of one run in how many."""
        slot_bytes = sum(part.slot_bytes for part in memory.layout.parts)
        num_slots = sum(num_slots for _, num_slots, _ in runs)
        self.num_bytes = num_slots * slot_bytes * self._num_layers
        """What the rank writes, of all its layers."""

    def check(self, layer_idx: int, checksum: int, every: int) -> bool:
        """Compare one of the writer's layers; of one run in `every`."""
        if self._right.get(layer_idx) == (checksum, every):
            return True
        if self._runs.checksums(self._memory, self._first_layer + layer_idx, every) != [checksum]:
            return False
        self._right[layer_idx] = checksum, every
        return True

    def find_mismatch(
        self, checksums: Sequence[int], every: int, wait_s: float, is_over: Callable[[], bool]
    ) -> str:
        """What differs, empty if nothing does or if `is_over` says that nobody cares any more.

        checksums: one per layer of the writer, or none at all. wait_s: how long they may take to
        come right.
        """
        if checksums and len(checksums) != self._num_layers:
            return f"{len(checksums)} checksums for {self._num_layers} layers"
        deadline_s = time.monotonic() + wait_s
        for layer_idx, checksum in enumerate(checksums):
            while not self.check(layer_idx, checksum, every):
                if time.monotonic() >= deadline_s:
                    return f"checksum of layer {layer_idx} does not match"
                time.sleep(LANDING_POLL_S)
            if is_over():
                break
        return ""
