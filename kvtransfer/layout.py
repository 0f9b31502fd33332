"""Geometry of the paged KV cache of one rank, and its identity for the handshake.

Per layer: K and V, each [num_blocks, num_kv_heads, block_size, head_dim], contiguous. One head of one block is one run of bytes.
"""

from dataclasses import asdict, dataclass

import xxhash

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class KVLayout:
    """What must agree, or be resharded, between a writer and a reader."""

    dtype: str
    num_layers: int
    num_kv_heads: int
    """Heads held by this rank."""
    head_dim: int
    block_size: int
    """Tokens per block."""
    tp_rank: int = 0
    tp_size: int = 1
    total_num_kv_heads: int = 0
    """Heads of the whole model; 0 means num_kv_heads."""
    kv_lora_rank: int = 0
    """MLA latent width; 0 for plain attention."""
    rope_dim: int = 0
    """MLA rope width; 0 for plain attention."""

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one block in K (V is the same)."""
        return self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in K of one layer (V is the same)."""
        return self.num_kv_heads * self.head_bytes

    @property
    def block_bytes_all_layers(self) -> int:
        """Bytes that one block takes in K and V over all layers."""
        return 2 * self.num_layers * self.block_bytes

    @property
    def digest(self) -> str:
        """Hash of every field, for the handshake."""
        return xxhash.xxh3_64_hexdigest(repr(sorted(asdict(self).items())).encode())
