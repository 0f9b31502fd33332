"""Checksums of moved bytes, in a form that does not depend on the order in which they are pushed.

    checksum(layer) = sum over runs and parts of
                          xxh3_64(bytes of the run, seed P * place + part index)     modulo 2^64

with P parts a layer, and runs and places as in reshard.py: both ends know them, also where they cut
the KV into blocks and ranks differently. The seed ties a run to its place, so swapped runs or parts
do not cancel out; the sum lets chunks of a prompt be hashed as they are sent. Of a sampled transfer
only some runs count, others in each layer, the first one always. Source: XXH3 by Yann
Collet (https://xxhash.com), from the `xxhash` package.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from kvtransfer.registration import KVMemory

MASK = (1 << 64) - 1

HashedRun = tuple[int, int, int]
"""(first slot in the memory that is hashed, number of slots, place)."""


class HashedRuns:
    """Runs of one or several groups, prepared to be hashed in layer after layer."""

    def __init__(self, groups: Sequence[Iterable[HashedRun]]):
        self._num_groups = len(groups)
        self._runs = [(index, *run) for index, runs in enumerate(groups) for run in runs]
        self._places = np.array([run[3] for run in self._runs], dtype=np.uint64)
        self._samples: dict[int, list[list[tuple[int, int, int, int]]]] = {}
        """By one run in how many, then layer."""

    def checksums(self, memory: KVMemory, layer_idx: int, every: int = 1) -> list[int]:
        """Per group the checksum of one layer, all parts of it; of one run in `every`."""
        parts, num_layers = memory.layout.parts, memory.layout.num_layers
        runs = self._runs if every == 1 else self._sampled(layer_idx, every, num_layers)
        view, num_parts = memory.view, len(parts)
        totals = [0] * self._num_groups
        for part_idx, part in enumerate(parts):
            region = memory.regions[num_parts * layer_idx + part_idx]
            base, size = region.base_address - memory.base_address, part.slot_bytes
            for group, slot, num_slots, place in runs:
                start = base + slot * size
                data = view[start : start + num_slots * size]
                totals[group] += xxh3_64_intdigest(data, num_parts * place + part_idx)
        return [total & MASK for total in totals]

    def _sampled(
        self, layer_idx: int, every: int, num_layers: int
    ) -> list[tuple[int, int, int, int]]:
        """The runs that count, chosen for all layers at once."""
        if every not in self._samples:
            layers = np.arange(num_layers, dtype=np.uint64)[:, np.newaxis]
            # Multiplicative hashing: places are multiples of a run's length, so their low bits are
            # alike. 64 bits hold the sum of both products without a carry that is lost.
            mixed = self._places * np.uint64(0x9E3779B1) + layers * np.uint64(0x85EBCA77)
            is_sampled = (mixed & np.uint64(0xFFFFFFFF)) >> np.uint64(16)
            is_sampled = (is_sampled % np.uint64(every) == 0) | (self._places == 0)
            samples: list[list[tuple[int, int, int, int]]] = [[] for _ in range(num_layers)]
            for layer, index in np.argwhere(is_sampled).tolist():
                samples[layer].append(self._runs[index])
            self._samples[every] = samples
        return self._samples[every][layer_idx]


def sum_checksums(checksums: Iterable[int]) -> int:
    """Combine the runs of a layer."""
    return sum(checksums) & MASK
