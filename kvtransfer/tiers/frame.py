"""A block outside of this process: a header that says what it is and how its bytes hash.

| magic and version, 8 | block hash, 16 | number of bytes, 8 | xxh3_128 of the bytes, 16 | bytes |
"""

import struct

import xxhash

MAGIC = b"pdskv\x00\x00\x01"
HEADER = struct.Struct("<8s16sQ16s")


def pack_header(block_hash: bytes, data: memoryview) -> bytes:
    """What goes before the bytes."""
    return HEADER.pack(MAGIC, block_hash, len(data), xxhash.xxh3_128_digest(data))


def is_intact(header: bytes, block_hash: bytes, data: memoryview) -> bool:
    """Whether header and bytes are those of this block, whole and unchanged."""
    return header == pack_header(block_hash, data)
