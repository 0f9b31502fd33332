"""Prefix blocks beyond the KV cache: what is written to the tiers, and what is fetched for a
request before it is scheduled.

    a block becomes findable --> queued --held, copied by the thread--> in every tier without it
    a request --lookup--> the thread finds missing blocks --take, read--> findable --> scheduled

The engine thread decides and owns the blocks; one thread of this object does the copying and
answers with events. A block of the KV cache that is copied, either way, is referenced meanwhile.
Tiers are a cache: whatever fails there is a miss.
"""

import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.block_manager import BlockManager
from engine.request import Request, RequestKey
from kvtransfer.registration import KVMemory
from kvtransfer.tiers.base import TierStack
from kvtransfer.tiers.blocks import gather_block, scatter_block
from protos import worker_pb2

_CLOSE_TIMEOUT_S = 5.0
_FIND_TIMEOUT_S = 1.0
_LOAD_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class TierFound:
    """So many of a request's missing blocks, from the first on, are in the tiers."""

    key: RequestKey
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TierLoaded:
    """The first num_blocks of block_ids hold the blocks of these hashes; the others hold junk."""

    key: RequestKey
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TierWritten:
    """The thread is through with a block of the KV cache."""

    block_id: int


TierEvent = TierFound | TierLoaded | TierWritten


@dataclass(frozen=True, slots=True)
class _Find:
    key: RequestKey
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Load:
    key: RequestKey
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Write:
    block_hash: bytes
    block_id: int


@dataclass(slots=True)
class _Lookup:
    request: Request
    deadline_s: float
    """After it, on time.monotonic(), the request is scheduled without what the tiers have."""


class PrefixTiers:
    """See the module's docstring. All but the thread's body belongs to the engine thread."""

    def __init__(
        self, stack: TierStack, memory: KVMemory, *, max_pinned_blocks: int, num_blocks: int
    ) -> None:
        self._stack = stack
        self._memory = memory
        self._blocks: BlockManager | None = None
        self._on_event: Callable[[TierEvent], None] | None = None
        self._max_pinned_blocks = max_pinned_blocks
        self._max_queued = num_blocks
        self._queued: OrderedDict[bytes, None] = OrderedDict()
        self._num_pinned = 0
        self._lookups: dict[RequestKey, _Lookup] = {}
        self._loading: set[bytes] = set()
        self._waiting: deque[RequestKey] = deque()
        self.num_promoted_blocks = 0
        """Blocks fetched into the KV cache since the start."""
        self._jobs: queue.PriorityQueue[tuple[int, int, _Find | _Load | _Write | None]] = (
            queue.PriorityQueue()
        )
        self._num_jobs = 0
        self._thread = threading.Thread(target=self._run, name="prefix-tiers", daemon=True)

    def start(self, blocks: BlockManager, on_event: Callable[[TierEvent], None]) -> None:
        """Begin; on_event is called from the thread and hands the event to `on_tier_event`."""
        self._blocks = blocks
        self._on_event = on_event
        if self._stack.tiers:
            self._thread.start()

    def stored(self, block_hash: bytes) -> None:
        """See BlockJournal: queue the block for the tiers."""
        if not self._stack.tiers:
            return
        self._queued[block_hash] = None
        if len(self._queued) > self._max_queued:
            self._queued.popitem(last=False)
        self._write_queued()

    def removed(self, block_hash: bytes) -> None:
        """See BlockJournal: it left before it could be written."""
        self._queued.pop(block_hash, None)

    def lookup(self, request: Request) -> bool:
        """Ask the tiers for what the KV cache lacks of a prompt, before it is scheduled.

        False: there is nothing to ask for. Else `on_tier_event` names the request's key later.
        """
        assert self._blocks is not None, "start comes first"
        hashes = self._blocks.missing_hashes(request)
        if not hashes or not self._stack.tiers:
            return False
        self._lookups[request.key] = _Lookup(request, time.monotonic() + _FIND_TIMEOUT_S)
        self._submit(_Find(request.key, tuple(hashes)))
        return True

    def forget(self, key: RequestKey) -> None:
        """The request is over; its key will not be named."""
        self._lookups.pop(key, None)

    def overdue(self) -> list[RequestKey]:
        """Requests that waited long enough, to be scheduled now."""
        if not self._lookups:
            return []
        now_s = time.monotonic()
        late = [key for key, lookup in self._lookups.items() if lookup.deadline_s <= now_s]
        for key in late:
            self.forget(key)
        return late

    def on_tier_event(self, event: TierEvent) -> list[RequestKey]:
        """Take in what the thread did; return the requests that may be scheduled now."""
        assert self._blocks is not None, "start comes first"
        match event:
            case TierWritten(block_id):
                self._num_pinned -= 1
                self._blocks.drop([block_id])
                self._write_queued()
                return []
            case TierFound(key, num_blocks):
                return self._fetch(key, num_blocks)
            case TierLoaded():
                return self._adopt(event)

    def stats(self) -> list[worker_pb2.TierStats]:
        """Counters of every tier."""
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
        """Finish the copies under way, bounded in time, and close the tiers."""
        if self._thread.is_alive():
            self._submit(None)
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _fetch(self, key: RequestKey, num_found: int) -> list[RequestKey]:
        assert self._blocks is not None
        lookup = self._lookups.get(key)
        if lookup is None:
            return []
        hashes = self._blocks.missing_hashes(lookup.request)[:num_found]
        lookup.deadline_s = time.monotonic() + _LOAD_TIMEOUT_S
        if hashes and hashes[0] in self._loading:
            # Another request fetches the same prefix: look again when it is here.
            self._waiting.append(key)
            return []
        block_ids = self._blocks.take(len(hashes))
        if not block_ids:
            del self._lookups[key]
            return [key]
        hashes = hashes[: len(block_ids)]
        self._loading.update(hashes)
        self._submit(_Load(key, tuple(hashes), tuple(block_ids)))
        return []

    def _adopt(self, event: TierLoaded) -> list[RequestKey]:
        assert self._blocks is not None
        for block_hash, block_id in zip(
            event.hashes[: event.num_blocks], event.block_ids, strict=False
        ):
            self._blocks.adopt(block_id, block_hash)
        self.num_promoted_blocks += event.num_blocks
        # NOTE: last block first, so that the beginning of a prefix is evicted last.
        self._blocks.drop(reversed(event.block_ids))
        self._loading.difference_update(event.hashes)
        ready = [event.key] if self._lookups.pop(event.key, None) is not None else []
        for key in [self._waiting.popleft() for _ in range(len(self._waiting))]:
            lookup = self._lookups.pop(key, None)
            if lookup is not None and not self.lookup(lookup.request):
                ready.append(key)
        return ready

    def _write_queued(self) -> None:
        assert self._blocks is not None, "start comes first"
        while self._queued and self._num_pinned < self._max_pinned_blocks:
            block_hash, _ = self._queued.popitem(last=False)
            block_id = self._blocks.hold(block_hash)
            if block_id is not None:
                self._num_pinned += 1
                self._submit(_Write(block_hash, block_id))

    def _submit(self, job: _Find | _Load | _Write | None) -> None:
        # What a request waits for goes before what is only kept for later ones.
        priority = 0 if isinstance(job, _Find | _Load) else 1
        self._num_jobs += 1
        self._jobs.put((priority, self._num_jobs, job))

    def _run(self) -> None:
        """Body of the thread: copy, until a None comes."""
        buffer = memoryview(bytearray(self._memory.layout.block_bytes_all_layers))
        while (job := self._jobs.get()[2]) is not None:
            match job:
                case _Find():
                    self._find(job)
                case _Load():
                    self._load(job, buffer)
                case _Write():
                    self._write(job, buffer)
        self._stack.close()

    def _find(self, job: _Find) -> None:
        self._emit(TierFound(job.key, len(self._stack.locate(job.hashes))))

    def _load(self, job: _Load, buffer: memoryview) -> None:
        num_loaded = 0
        for block_hash, block_id in zip(job.hashes, job.block_ids, strict=True):
            if self._stack.read(block_hash, buffer) is None:
                break
            scatter_block(self._memory, block_id, buffer)
            num_loaded += 1
        self._emit(TierLoaded(job.key, job.hashes, job.block_ids, num_loaded))

    def _write(self, job: _Write, buffer: memoryview) -> None:
        tiers = self._stack.missing(job.block_hash)
        if tiers:
            gather_block(self._memory, job.block_id, buffer)
        self._emit(TierWritten(job.block_id))
        for tier in tiers:
            tier.write(job.block_hash, buffer)

    def _emit(self, event: TierEvent) -> None:
        assert self._on_event is not None, "start comes first"
        self._on_event(event)
