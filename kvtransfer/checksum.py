"""Checksums of moved bytes, in a form that does not depend on the order in which they are pushed.

    checksum(layer) = sum over runs and parts of
                          xxh3_64(bytes of the run, seed P * place + part index)     modulo 2^64

with P parts a layer, and runs and places as in reshard.py: both ends know them, also where they cut
the KV into blocks and ranks differently. The seed ties a run to its place, so swapped runs or parts
do not cancel out; the sum lets chunks of a prompt be hashed as they are sent. Of a sampled transfer
only some runs count, others in each layer, the first one always. Source: XXH3 by Yann
Collet (https://xxhash.com), from the `xxhash` package.
"""

from collections.abc import Iterable

import xxhash

from kvtransfer.registration import KVMemory

MASK = (1 << 64) - 1

HashedRun = tuple[int, int, int]
"""(first slot in the memory that is hashed, number of slots, place)."""


def runs_checksum(
    memory: KVMemory, layer_idx: int, runs: Iterable[HashedRun], every: int = 1
) -> int:
    """Checksum of some runs of one layer, all parts of them; of one run in `every`."""
    runs = tuple(run for run in runs if every == 1 or _is_sampled(run[2], layer_idx, every))
    parts = memory.layout.parts
    total = 0
    for part_idx, part in enumerate(parts):
        region = memory.regions[len(parts) * layer_idx + part_idx]
        base, size = region.base_address - memory.base_address, part.slot_bytes
        for slot, num_slots, place in runs:
            start = base + slot * size
            data = memory.view[start : start + num_slots * size]
            total += xxhash.xxh3_64_intdigest(data, len(parts) * place + part_idx)
    return total & MASK


def sum_checksums(checksums: Iterable[int]) -> int:
    """Combine the runs of a layer."""
    return sum(checksums) & MASK


def _is_sampled(place: int, layer_idx: int, every: int) -> bool:
    # Multiplicative hashing: places are multiples of a run's length, so their low bits are alike.
    mixed = (place * 0x9E3779B1 + layer_idx * 0x85EBCA77) & 0xFFFFFFFF
    return place == 0 or (mixed >> 16) % every == 0
