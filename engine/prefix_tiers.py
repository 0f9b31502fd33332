"""Prefix blocks beyond the KV cache: what is written to the tiers, and what is fetched for a
request before it is scheduled.

    a block becomes findable --> queued --held, copied by the thread--> in every tier without it
    a request --lookup--> the thread finds missing blocks --take, read--> findable --> scheduled

The engine thread decides and owns the blocks; a thread of every rank does the copying (see
tier_worker.py). A block of the KV cache that is copied, either way, is referenced meanwhile.
Tiers are a cache: whatever fails there is a miss.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.block_manager import BlockManager
from engine.request import Request, RequestKey
from engine.tier_worker import Find, Load, TierJobs, Write
from protos import worker_pb2

_FIND_TIMEOUT_S = 1.0
_LOAD_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class TierEvent:
    """A job is done, by every rank; for so many blocks, from the first on."""

    number: int
    num_blocks: int
    dp_rank: int
    """Whose tiers they are."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A job for a request."""

    key: RequestKey
    job: Find | Load


@dataclass(slots=True)
class _Lookup:
    request: Request
    deadline_s: float
    """After it, on time.monotonic(), the request is scheduled without what the tiers have."""


class PrefixTiers:
    """Of one pool of blocks; see the module's docstring. Belongs to the engine thread."""

    def __init__(
        self, jobs: TierJobs, *, max_pinned_blocks: int, num_blocks: int, dp_rank: int = 0
    ) -> None:
        self._jobs = jobs
        self._dp_rank = dp_rank
        self._blocks: BlockManager | None = None
        self._max_pinned_blocks = max_pinned_blocks
        self._max_queued = num_blocks
        self._queued: OrderedDict[bytes, None] = OrderedDict()
        self._num_pinned = 0
        self._lookups: dict[RequestKey, _Lookup] = {}
        self._loading: set[bytes] = set()
        self._waiting: deque[RequestKey] = deque()
        self.num_promoted_blocks = 0
        """Blocks fetched into the KV cache since the start."""
        self._open: dict[int, _Asked | Write] = {}
        self._num_jobs = 0

    def start(self, blocks: BlockManager, on_event: Callable[[TierEvent], None]) -> None:
        """Begin; on_event is called from another thread, hands the event to `on_tier_event`."""
        self._blocks = blocks
        dp_rank = self._dp_rank
        self._jobs.start(
            lambda number, num_blocks: on_event(TierEvent(number, num_blocks, dp_rank))
        )

    def stored(self, block_hash: bytes) -> None:
        """See BlockJournal: queue the block for the tiers."""
        if not self._jobs.is_on:
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
        if not self._jobs.is_on or not (hashes := self._blocks.missing_hashes(request)):
            return False
        self._lookups[request.key] = _Lookup(request, time.monotonic() + _FIND_TIMEOUT_S)
        self._submit(_Asked(request.key, Find(tuple(hashes))))
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
        """Take in what was done; return the requests that may be scheduled now."""
        assert self._blocks is not None, "start comes first"
        match self._open.pop(event.number):
            case Write(_, block_id):
                self._num_pinned -= 1
                self._blocks.drop([block_id])
                self._write_queued()
                return []
            case _Asked(key, Find()):
                return self._fetch(key, event.num_blocks)
            case _Asked(key, load):
                assert isinstance(load, Load)
                return self._adopt(key, load, event.num_blocks)

    def stats(self) -> list[worker_pb2.TierStats]:
        """Counters of every tier, as the leader's rank sees them."""
        return self._jobs.stats()

    def close(self) -> None:
        """Finish the copies under way, bounded in time, and close the tiers."""
        self._jobs.close()

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
        self._submit(_Asked(key, Load(tuple(hashes), tuple(block_ids))))
        return []

    def _adopt(self, key: RequestKey, load: Load, num_loaded: int) -> list[RequestKey]:
        assert self._blocks is not None
        for block_hash, block_id in zip(
            load.hashes[:num_loaded], load.block_ids[:num_loaded], strict=True
        ):
            self._blocks.adopt(block_id, block_hash)
        self.num_promoted_blocks += num_loaded
        # NOTE: last block first, so that the beginning of a prefix is evicted last.
        self._blocks.drop(reversed(load.block_ids))
        self._loading.difference_update(load.hashes)
        ready = [key] if self._lookups.pop(key, None) is not None else []
        for waiting in [self._waiting.popleft() for _ in range(len(self._waiting))]:
            lookup = self._lookups.pop(waiting, None)
            if lookup is not None and not self.lookup(lookup.request):
                ready.append(waiting)
        return ready

    def _write_queued(self) -> None:
        assert self._blocks is not None, "start comes first"
        while self._queued and self._num_pinned < self._max_pinned_blocks:
            block_hash, _ = self._queued.popitem(last=False)
            block_id = self._blocks.hold(block_hash)
            if block_id is not None:
                self._num_pinned += 1
                self._submit(Write(block_hash, block_id))

    def _submit(self, asked: _Asked | Write) -> None:
        self._num_jobs += 1
        self._open[self._num_jobs] = asked
        self._jobs.submit(self._num_jobs, asked.job if isinstance(asked, _Asked) else asked)
