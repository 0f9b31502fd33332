"""Blocks of a KV cache as one run of bytes: layer by layer, part by part."""

from kvtransfer.registration import KVMemory


def gather_block(memory: KVMemory, block_id: int, into: memoryview) -> None:
    """Copy a block of all layers out; `into` has layout.block_bytes_all_layers bytes."""
    offset = 0
    for region in memory.regions:
        start = region.base_address - memory.base_address + block_id * region.block_bytes
        into[offset : offset + region.block_bytes] = memory.view[start : start + region.block_bytes]
        offset += region.block_bytes


def scatter_block(memory: KVMemory, block_id: int, data: memoryview) -> None:
    """Inverse of gather_block."""
    offset = 0
    for region in memory.regions:
        start = region.base_address - memory.base_address + block_id * region.block_bytes
        memory.view[start : start + region.block_bytes] = data[offset : offset + region.block_bytes]
        offset += region.block_bytes
