"""The thread of one rank that finds, reads and writes prefix blocks in its tiers.

Jobs are numbered; `on_done(number, num_blocks)` follows each, from the thread. What a request waits
for goes before what is only kept for later ones.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.registration import KVMemory
from kvtransfer.tiers.base import TierStack
from kvtransfer.tiers.blocks import gather_block, scatter_block
from protos import worker_pb2

_CLOSE_TIMEOUT_S = 5.0

OnDone = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Find:
    """How many of these blocks, from the first on, are in the tiers?"""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Fill these blocks of the KV cache; how many of them, from the first on, were filled?"""

    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """Keep a block of the KV cache; done once it is copied."""

    block_hash: bytes
    block_id: int


Job = Find | Load | Write


class TierJobs(Protocol):
    """Who carries out the jobs: one rank, or all of an engine."""

    @property
    def is_on(self) -> bool:
        """Whether there are tiers."""
        ...

    def start(self, on_done: OnDone) -> None:
        """Begin; before the first job."""
        ...

    def submit(self, number: int, job: Job) -> None:
        """Queue a job; return at once."""
        ...

    def stats(self) -> list[worker_pb2.TierStats]:
        """Counters of every tier."""
        ...

    def close(self) -> None:
        """Finish the copies under way, bounded in time, and close the tiers."""
        ...


class TierWorker:
    """Implements TierJobs for one rank. Without tiers it takes no jobs."""

    def __init__(self, stack: TierStack, memory: KVMemory) -> None:
        self._stack = stack
        self._memory = memory
        self._on_done: OnDone | None = None
        self._jobs: queue.PriorityQueue[tuple[int, int, Job | None]] = queue.PriorityQueue()
        self._thread = threading.Thread(target=self._run, name="prefix-tiers", daemon=True)

    @property
    def is_on(self) -> bool:
        """See TierJobs."""
        return bool(self._stack.tiers)

    def start(self, on_done: OnDone) -> None:
        """See TierJobs."""
        self._on_done = on_done
        if self.is_on:
            self._thread.start()

    def submit(self, number: int, job: Job) -> None:
        """See TierJobs; numbers ascend."""
        self._jobs.put((1 if isinstance(job, Write) else 0, number, job))

    def stats(self) -> list[worker_pb2.TierStats]:
        """See TierJobs."""
        return [
            worker_pb2.TierStats(
                tier=tier.name,
                num_read_blocks=tier.counters.num_read,
                num_written_blocks=tier.counters.num_written,
                num_corrupt_blocks=tier.counters.num_corrupt,
                num_evicted_blocks=tier.counters.num_evicted,
                num_failures=tier.counters.num_failures,
                num_used_bytes=tier.num_used_bytes(),
            )
            for tier in self._stack.tiers
        ]

    def close(self) -> None:
        """See TierJobs."""
        if self._thread.is_alive():
            self._jobs.put((2, 0, None))
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        """Body of the thread: until a None comes, after all jobs."""
        buffer = memoryview(bytearray(self._memory.layout.block_bytes_all_layers))
        while True:
            _, number, job = self._jobs.get()
            match job:
                case Find(hashes):
                    self._done(number, len(self._stack.locate(hashes)))
                case Load():
                    self._done(number, self._load(job, buffer))
                case Write():
                    self._write(number, job, buffer)
                case None:
                    self._stack.close()
                    return

    def _load(self, job: Load, buffer: memoryview) -> int:
        num_loaded = 0
        for block_hash, block_id in zip(job.hashes, job.block_ids, strict=True):
            if self._stack.read(block_hash, buffer) is None:
                break
            scatter_block(self._memory, block_id, buffer)
            num_loaded += 1
        return num_loaded

    def _write(self, number: int, job: Write, buffer: memoryview) -> None:
        tiers = self._stack.missing(job.block_hash)
        if tiers:
            gather_block(self._memory, job.block_id, buffer)
        # NOTE: the block may go before the storage has it: the copy is what is written.
        self._done(number, 1)
        for tier in tiers:
            tier.write(job.block_hash, buffer)

    def _done(self, number: int, num_blocks: int) -> None:
        assert self._on_done is not None, "start comes first"
        self._on_done(number, num_blocks)
