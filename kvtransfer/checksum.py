"""Checksums of moved blocks, in a form that does not depend on the order in which they are pushed.

    checksum(layer) = sum over target index i of
                          xxh3_64(part 0 of block i, seed 2 i)
                        + xxh3_64(part 1 of block i, seed 2 i + 1)      modulo 2^64

The seed ties a block to its place, so swapped blocks or parts do not cancel out; the sum lets
chunks of a prompt be hashed as they are sent. Source: XXH3 by Yann Collet (https://xxhash.com),
from the `xxhash` package.
"""

from collections.abc import Sequence

import xxhash

from kvtransfer.registration import KVMemory

MASK = (1 << 64) - 1


def block_checksum(memory: KVMemory, layer_idx: int, block_id: int, target_index: int) -> int:
    """Checksum of both parts of one block of one layer, block target_index of a transfer."""
    total = 0
    for part_idx in (0, 1):
        region = memory.regions[2 * layer_idx + part_idx]
        start = region.base_address - memory.base_address + block_id * region.block_bytes
        data = memory.view[start : start + region.block_bytes]
        total += xxhash.xxh3_64_intdigest(data, 2 * target_index + part_idx)
    return total & MASK


def layer_checksum(memory: KVMemory, layer_idx: int, block_ids: Sequence[int]) -> int:
    """Checksum of one layer of a whole transfer; block_ids are in target order."""
    return sum_checksums(
        [block_checksum(memory, layer_idx, block_id, i) for i, block_id in enumerate(block_ids)]
    )


def sum_checksums(checksums: Sequence[int]) -> int:
    """Combine the blocks of a layer."""
    return sum(checksums) & MASK
