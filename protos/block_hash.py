"""The identity of a full KV block, equal in every process: part of what goes over the wire."""

from array import array
from collections.abc import Sequence

import xxhash

from protos import worker_pb2

BLOCK_HASH_BYTES = 16


def kv_identity(model: str, layout: worker_pb2.KVLayout) -> str:
    """What makes the same tokens' KV differ between workers: model, weights, how KV is held."""
    return f"{model}/{layout.weights}/{layout.dtype}"


def block_salt(kv_identity: str, adapter: str, cache_salt: str) -> str:
    """`kv_identity`: model and quantisation of a worker. `cache_salt`: of a tenant."""
    return f"{kv_identity}/{adapter}/{cache_salt}"


def root_hash(salt: str) -> bytes:
    """Hash that stands before the first block; `salt` separates models, adapters and tenants."""
    return xxhash.xxh3_128_digest(b"pdserve/1/" + salt.encode())


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of one full block: chained from `parent`, so it names all tokens before it too."""
    return xxhash.xxh3_128_digest(parent + array("I", token_ids).tobytes())


def hash_blocks(token_ids: Sequence[int], block_size: int, salt: str) -> list[bytes]:
    """Hashes of all full blocks of `token_ids`, in order; a partial last block has none."""
    parent = root_hash(salt)
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
