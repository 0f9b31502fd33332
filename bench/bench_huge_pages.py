"""Decode attention on KV in ordinary pages and in huge ones: whether they would pay on a machine.

Both pools are shared memory as the cache is (memfd), in the packaged model's shapes; the kernel is
asked to collapse one of them into pages of 2 MiB (MADV_COLLAPSE, Linux 6.1 or later), which it does
whatever `shmem_enabled` says, unless that is `deny`. They take turns; the ratio is that of each
pair. Blocks of a sequence lie anywhere in the pool, the worst case, or one after the other.
"""

import argparse
import ctypes
import mmap
import os
import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from worker_engine import duration_s

from kernels.ops import select_ops

HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25
MAP_FIXED = 0x10
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 32
LOADS = ((1, 128), (8, 128), (32, 128), (1, 1024), (8, 1024), (32, 1024), (1, 4096), (1, 8000))
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Pool = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]."""


def shared_memory(num_bytes: int) -> Tensor:
    """[num_bytes] uint8 of a memfd, mapped from a huge page's border; kept until the process ends.

    Raises: OSError: it cannot be mapped.
    """
    fd = os.memfd_create("bench-huge-pages", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    # NOTE: file offset and address must agree modulo 2 MiB, so the border is looked for in address
    # space that is taken first.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    taken = _libc.mmap(None, num_bytes + HUGE_PAGE, mmap.PROT_READ, flags, -1, 0)
    border = -(-taken // HUGE_PAGE) * HUGE_PAGE
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(border, num_bytes, access, mmap.MAP_SHARED | MAP_FIXED, fd, 0)
    if address != border:
        raise OSError(ctypes.get_errno(), f"cannot map {num_bytes} bytes")
    return torch.from_numpy(
        np.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=np.uint8)
    )


def collapse(memory: Tensor) -> None:
    """Put all of it into huge pages, as fast as the kernel copies.

    Raises: OSError: the kernel refuses, or has no huge pages left.
    """
    if _libc.madvise(memory.data_ptr(), len(memory), MADV_COLLAPSE):
        error = ctypes.get_errno()
        raise OSError(error, f"MADV_COLLAPSE: {os.strerror(error)}")


def make_pool(num_blocks: int, *, is_huge: bool) -> Pool:
    """A pool of which every page was written."""
    shape = (2 * NUM_LAYERS, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    num_bytes = 4 * int(np.prod(shape))
    memory = shared_memory(-(-num_bytes // HUGE_PAGE) * HUGE_PAGE)
    memory.view(torch.float32).fill_(1.0)
    if is_huge:
        seconds = duration_s(lambda: collapse(memory))
        print(f"collapsed {len(memory) >> 20} MiB in {seconds:.2f} s\n")
    parts = memory[:num_bytes].view(torch.float32).view(shape)
    return [(parts[2 * layer], parts[2 * layer + 1]) for layer in range(NUM_LAYERS)]


def attention(pool: Pool, table: Tensor, context: int) -> Callable[[], None]:
    """Of all layers of a decode step; table: [num_seqs, blocks] int32."""
    ops, num_seqs = select_ops("cpu"), len(table)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    contexts = torch.full((num_seqs,), context, dtype=torch.int32)
    q = torch.randn(num_seqs, NUM_HEADS, HEAD_DIM)

    def run() -> None:
        for k, v in pool:
            ops.paged_attention(q, k, v, table, starts, contexts, HEAD_DIM**-0.5, 1)

    return run


@torch.inference_mode()
def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--blocks", type=int, default=1100, help="of each pool, 1.41 MiB a block")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    num_blocks = arguments.blocks
    pools = [make_pool(num_blocks, is_huge=is_huge) for is_huge in (False, True)]
    between = torch.ones(16 << 20)
    print(
        "| batch | context | blocks | ordinary ms | huge ms | ordinary / huge | least to greatest |"
    )
    print("|---|---|---|---|---|---|---|")
    for batch, context in LOADS:
        blocks = -(-context // BLOCK_SIZE)
        if batch * blocks > num_blocks:
            continue
        orders = {"anywhere": torch.randperm(num_blocks), "in a row": torch.arange(num_blocks)}
        for place, order in orders.items():
            table = order[: batch * blocks].int().view(batch, blocks)
            runs = [attention(pool, table, context) for pool in pools]
            times: list[list[float]] = [[], []]
            for index in range(arguments.rounds + 1):
                for which in (0, 1) if index % 2 else (1, 0):
                    between.sum()  # weights take the place of KV in the caches
                    times[which].append(1e3 * duration_s(runs[which]))
            # The first round warms up.
            ratios = [a / b for a, b in zip(times[0][1:], times[1][1:], strict=True)]
            ordinary, huge = (statistics.median(values[1:]) for values in times)
            print(
                f"| {batch} | {context} | {place} | {ordinary:.2f} | {huge:.2f} "
                f"| {statistics.median(ratios):.3f} | {min(ratios):.2f} to {max(ratios):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
