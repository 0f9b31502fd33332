"""The memory that holds one rank's paged KV cache, laid out so that a transport can be given all of
it at once.

    | layer 0: part 0 | layer 0: part 1 | layer 1: part 0 | ... | last page: a random nonce |

Each part starts at a page. The memory is an anonymous file (memfd): a process on the same host can
map it, nothing has to be unlinked, and it is gone with the last process that maps it, however that
ends. Pages are zero and take no memory until touched.
"""

import ctypes
import mmap
import os
import secrets
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvtransfer.layout import KVLayout
from protos import worker_pb2

NONCE_BYTES = 32
TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class RegisteredRegion:
    """One part of one layer: num_blocks runs of block_bytes from base_address on."""

    tp_rank: int
    layer_idx: int
    part: str
    base_address: int
    num_bytes: int
    block_bytes: int

    def to_proto(self) -> worker_pb2.MemoryRegion:
        """The same on the wire."""
        return worker_pb2.MemoryRegion(
            tp_rank=self.tp_rank,
            layer_idx=self.layer_idx,
            part=self.part,
            base_address=self.base_address,
            num_bytes=self.num_bytes,
            block_bytes=self.block_bytes,
        )

    @classmethod
    def from_proto(cls, message: worker_pb2.MemoryRegion) -> "RegisteredRegion":
        """Read what to_proto wrote."""
        return cls(
            tp_rank=message.tp_rank,
            layer_idx=message.layer_idx,
            part=message.part,
            base_address=message.base_address,
            num_bytes=message.num_bytes,
            block_bytes=message.block_bytes,
        )


class KVMemory:
    """Owner of the cache of one rank; lives as long as the engine that computes into it."""

    def __init__(self, layout: KVLayout, num_blocks: int, mapping: mmap.mmap, fd: int | None):
        self.layout = layout
        self.num_blocks = num_blocks
        self.fd = fd
        """The memfd, or None where memory is anonymous and no other process can map it."""
        self.num_bytes = len(mapping)
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        mapping[-NONCE_BYTES:] = self.nonce
        self._mapping = mapping
        anchor = ctypes.c_char.from_buffer(mapping)
        self.base_address = ctypes.addressof(anchor)
        del anchor
        self.view = memoryview(mapping).cast("B")
        """All bytes; offset 0 is base_address."""
        self.caches: list[list[Tensor]] = [[] for _ in layout.parts]
        """Tensors [part][layer], each [num_blocks, num_heads, block_size, width]."""
        self.k_caches = self.caches[0]
        """Per layer [num_blocks, num_kv_heads, block_size, head_dim]; with MLA the latent."""
        self.v_caches = self.caches[1]
        """As k_caches; with MLA the rope part."""
        self.regions = self._carve()
        """By layer, then part: region len(parts) * layer_idx + part index."""

    @classmethod
    def allocate(cls, layout: KVLayout, num_blocks: int) -> "KVMemory":
        """Reserve address space for the cache; pages are taken when first written.

        Raises: ValueError: num_blocks is below 1. OSError: the system has no address space or
        descriptor left.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
        num_bytes = _padded(NONCE_BYTES) + layout.num_layers * sum(
            _padded(num_blocks * layout.part_block_bytes(part)) for part in layout.parts
        )
        try:
            fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC)
        except (AttributeError, OSError):
            return cls(layout, num_blocks, mmap.mmap(-1, num_bytes), None)
        try:
            os.ftruncate(fd, num_bytes)
            mapping = mmap.mmap(fd, num_bytes)
        except OSError:
            os.close(fd)
            raise
        return cls(layout, num_blocks, mapping, fd)

    def close(self) -> None:
        """Give the memory back once the last tensor that views it is gone. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        for caches in self.caches:
            caches.clear()
        try:
            self.view.release()
            self._mapping.close()
        except BufferError:
            # NOTE: a caller still holds a tensor; unmapping under it would crash the process.
            pass

    def _carve(self) -> tuple[RegisteredRegion, ...]:
        layout = self.layout
        # NOTE: not torch.frombuffer: it does not keep the mapping from being closed under a tensor.
        storage = torch.from_numpy(np.frombuffer(self._mapping, dtype=np.uint8))
        regions = []
        offset = 0
        for layer_idx in range(layout.num_layers):
            for part, caches in zip(layout.parts, self.caches, strict=True):
                block_bytes = layout.part_block_bytes(part)
                num_bytes = self.num_blocks * block_bytes
                shape = (self.num_blocks, part.num_heads, layout.block_size, part.width)
                dtype = TORCH_DTYPES[part.dtype]
                caches.append(storage[offset : offset + num_bytes].view(dtype).view(shape))
                regions.append(
                    RegisteredRegion(
                        tp_rank=layout.tp_rank,
                        layer_idx=layer_idx,
                        part=part.name,
                        base_address=self.base_address + offset,
                        num_bytes=num_bytes,
                        block_bytes=block_bytes,
                    )
                )
                offset += _padded(num_bytes)
        return tuple(regions)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
