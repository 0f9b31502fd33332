"""The memory that holds one rank's paged KV cache, laid out so that a transport can be given all of
it at once.

    | layer 0: part 0 | layer 0: part 1 | layer 1: part 0 | ... | last page: a random nonce |

Each part starts at a page. On the host the memory is an anonymous file (memfd): a process there can
map it, nothing has to be unlinked, and it is gone with the last process that maps it, however that
ends. Pages are zero and take no memory until touched.
"""

import ctypes
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.device_queue import Wait, nothing_to_wait_for
from kernels.kv_cache import KVCache, QuantizedCache
from kvtransfer.layout import KVLayout
from protos import worker_pb2

NONCE_BYTES = 32
DEVICE_ALIGNMENT = 2 << 20
"""Of an Ascend device's pages; memory is registered by whole ones."""
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

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        storage: Tensor,
        base_address: int,
        *,
        mapping: mmap.mmap | None,
        fd: int | None,
        alignment: int = mmap.PAGESIZE,
        bind_thread: Callable[[], None] = lambda: None,
        mark: Callable[[], Wait] = lambda: nothing_to_wait_for,
    ) -> None:
        """storage: [num_bytes] uint8, starting at base_address; see allocate and on_device."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.fd = fd
        """The memfd, or None where no other process can map the memory."""
        self.num_bytes = len(storage)
        self.base_address = base_address
        self.bind_thread = bind_thread
        """Every thread that hands addresses to a transport calls it first."""
        self.mark = mark
        """Called by a thread that computes: what waits until all that it has launched is done."""
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._mapping = mapping
        self._view: memoryview | None = None
        if mapping is not None:
            mapping[-NONCE_BYTES:] = self.nonce
            self._view = memoryview(mapping).cast("B")
        self.caches: list[list[Tensor]] = [[] for _ in layout.parts]
        """Tensors [part][layer], each [num_blocks, num_heads, block_size, width]."""
        self.k_caches = self.caches[0]
        """Per layer [num_blocks, num_kv_heads, block_size, head_dim]; with MLA the latent."""
        self.v_caches = self.caches[1]
        """As k_caches; with MLA the rope part."""
        self.regions = self._carve(storage, alignment)
        """By layer, then part: region len(parts) * layer_idx + part index."""
        self._quantized = self._with_scales()
        self.paged: tuple[Sequence[KVCache], Sequence[KVCache]] = (
            (self._quantized[0], self._quantized[1])
            if self._quantized
            else (self.k_caches, self.v_caches)
        )
        """k_caches and v_caches as attention takes them: with their scales, if they have any."""

    @property
    def view(self) -> memoryview:
        """All bytes; offset 0 is base_address. Memory of the host alone has it."""
        assert self._view is not None, "the host cannot read memory of a device"
        return self._view

    @classmethod
    def on_device(
        cls,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        bind_thread: Callable[[], None],
        mark: Callable[[], Wait],
    ) -> "KVMemory":
        """Take memory of a device, every part aligned for registration with an Ascend transport.

        bind_thread, mark: see `kernels.ops.Ops`.

        Raises: ValueError: num_blocks is below 1. RuntimeError: the device has no memory left.
        """
        num_bytes = _total(layout, num_blocks, DEVICE_ALIGNMENT) + DEVICE_ALIGNMENT
        taken = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        skipped = -taken.data_ptr() % DEVICE_ALIGNMENT
        storage = taken[skipped : skipped + num_bytes - DEVICE_ALIGNMENT]
        return cls(
            layout,
            num_blocks,
            storage,
            storage.data_ptr(),
            mapping=None,
            fd=None,
            alignment=DEVICE_ALIGNMENT,
            bind_thread=bind_thread,
            mark=mark,
        )

    @classmethod
    def allocate(cls, layout: KVLayout, num_blocks: int) -> "KVMemory":
        """Reserve address space for the cache; pages are taken when first written.

        Raises: ValueError: num_blocks is below 1. OSError: the system has no address space or
        descriptor left.
        """
        num_bytes = _total(layout, num_blocks, mmap.PAGESIZE) + _padded(NONCE_BYTES, mmap.PAGESIZE)
        try:
            fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC)
        except (AttributeError, OSError):
            return cls._on_host(layout, num_blocks, mmap.mmap(-1, num_bytes), None)
        try:
            os.ftruncate(fd, num_bytes)
            mapping = mmap.mmap(fd, num_bytes)
        except OSError:
            os.close(fd)
            raise
        return cls._on_host(layout, num_blocks, mapping, fd)

    @classmethod
    def _on_host(
        cls, layout: KVLayout, num_blocks: int, mapping: mmap.mmap, fd: int | None
    ) -> "KVMemory":
        anchor = ctypes.c_char.from_buffer(mapping)
        base_address = ctypes.addressof(anchor)
        del anchor
        # NOTE: not torch.frombuffer: it does not keep the mapping from being closed under a tensor.
        storage = torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))
        return cls(layout, num_blocks, storage, base_address, mapping=mapping, fd=fd)

    def close(self) -> None:
        """Give the memory back once the last tensor that views it is gone. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        for caches in self.caches:
            caches.clear()
        for quantized in self._quantized:
            quantized.clear()
        if self._mapping is None:
            return
        try:
            self.view.release()
            self._mapping.close()
        except BufferError:
            # NOTE: a caller still holds a tensor; unmapping under it would crash the process.
            pass

    def _with_scales(self) -> list[list[QuantizedCache]]:
        """Of k_caches and v_caches; empty: they are in floats."""
        if not self.layout.scale_dtype:
            return []
        half = len(self.caches) // 2
        return [
            [QuantizedCache(*tensors) for tensors in zip(values, scales, strict=True)]
            for values, scales in zip(self.caches[:half], self.caches[half:], strict=True)
        ]

    def _carve(self, storage: Tensor, alignment: int) -> tuple[RegisteredRegion, ...]:
        layout = self.layout
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
                offset += _padded(num_bytes, alignment)
        return tuple(regions)


def _total(layout: KVLayout, num_blocks: int, alignment: int) -> int:
    if num_blocks < 1:
        raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
    return layout.num_layers * sum(
        _padded(num_blocks * layout.part_block_bytes(part), alignment) for part in layout.parts
    )


def _padded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
