"""Blocks of the paged KV cache: who holds which, and which full ones a new request may share.

    free         -- allocate -----> referenced(1) -- free, not registered --> free
    cached-free  -- attach_prefix -> referenced(n) -- free, registered -----> cached-free
    referenced(1) -- quarantine ---> quarantined  -- release_quarantined ---> free

Free blocks without reusable content are taken first, then cached-free ones, oldest first.
Owned by one engine loop thread. An operation costs time by the blocks it moves, never by the pool.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.request import Request
from protos.block_hash import hash_block, hash_blocks, root_hash


class BlockJournal(Protocol):
    """Told of every change of what the prefix cache can find, on the loop's thread."""

    def stored(self, block_hash: bytes) -> None:
        """A block with this hash can be found from now on."""
        ...

    def removed(self, block_hash: bytes) -> None:
        """It cannot any more."""
        ...


class BlockManager:
    """Ref-counted blocks with a hash-chained prefix cache."""

    def __init__(
        self, num_blocks: int, block_size: int, journals: Sequence[BlockJournal] = ()
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks is {num_blocks}, block_size is {block_size}: both must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache_queries = 0
        """Tokens that requests looked up in the prefix cache, one count per request."""
        self.prefix_cache_hits = 0
        """Of these, tokens found."""
        self._journals = tuple(journals)
        self._ref_counts = [0] * num_blocks
        # The hash of every block that is full and computed; only one block per hash is findable.
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._findable: dict[bytes, int] = {}
        # Taken from the front: blocks without reusable content first, then the least recently used.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._quarantined: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached but unreferenced ones included."""
        return len(self._free)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that a request references or that are quarantined."""
        return self.num_blocks - len(self._free)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks that a remote writer may still touch."""
        return len(self._quarantined)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, token_ids: Sequence[int], cache_salt: str) -> list[int]:
        """Blocks that hold a prefix of `token_ids`; never all, so that a token is left to compute.

        Takes no reference: valid until the next call that allocates.
        """
        hashes = hash_blocks(token_ids, self.block_size, cache_salt)
        return self._find(hashes[: self._max_cached_blocks(len(token_ids))])

    def num_matched(self, request: Request) -> int:
        """Blocks that `attach_prefix` would find. Takes no reference."""
        return len(self._match_request(request))

    def fits(self, request: Request, num_tokens: int, num_spare_blocks: int = 0) -> bool:
        """Whether `num_tokens` tokens of the request fit, with `num_spare_blocks` left free.

        Changes nothing. For a request without blocks, what `attach_prefix` would find is counted.
        """
        needed = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if not request.block_ids:
            matched = self._match_request(request)
            # A cached block that nobody references leaves the free list too when attached.
            needed -= sum(1 for block_id in matched if self._ref_counts[block_id] > 0)
        return needed <= 0 or len(self._free) - needed >= num_spare_blocks

    def attach_prefix(self, request: Request, *, resumed: bool = False) -> int:
        """Give a request without blocks the cached blocks of its prefix; return their token count.

        Sets block_ids, block_hashes, num_computed_tokens and num_cached_tokens. A `resumed`
        (preempted) request keeps its num_cached_tokens and is not counted again. Prompt logprobs
        need every token computed: a request for them gets nothing.
        """
        assert not request.block_ids, "attach_prefix on a request that holds blocks"
        matched = self._match_request(request)
        for block_id in matched:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1
        num_cached = len(matched) * self.block_size
        request.block_ids = matched
        request.num_computed_tokens = num_cached
        if not resumed:
            request.num_cached_tokens = num_cached
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += num_cached
        return num_cached

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Grow block_ids until `num_tokens` tokens, counted from the first, fit.

        False, and nothing changed, if the pool has too few free blocks.
        """
        num_new = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if num_new > len(self._free):
            return False
        for _ in range(num_new):
            request.block_ids.append(self._take_free())
        return True

    def register_computed(self, request: Request) -> None:
        """Make the blocks findable that num_computed_tokens has filled since the last call.

        Where an equal block is findable already, the older one stays so.
        """
        num_full = request.num_computed_tokens // self.block_size
        first_new = num_full
        while first_new > 0 and self._hashes[request.block_ids[first_new - 1]] is None:
            first_new -= 1
        if first_new == num_full:
            return
        self._extend_hashes(request)
        for index in range(first_new, num_full):
            block_id, block_hash = request.block_ids[index], request.block_hashes[index]
            self._register(block_id, block_hash)

    def missing_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the blocks that `attach_prefix` would take if they were here, from the first
        that is not.
        """
        if request.sampling.num_prompt_logprobs is not None:
            return []
        num_matched = len(self._match_request(request))
        return request.block_hashes[num_matched : self._max_cached_blocks(request.num_tokens)]

    def findable(self) -> list[bytes]:
        """Every hash that the prefix cache finds."""
        return list(self._findable)

    def hold(self, block_hash: bytes) -> int | None:
        """Reference the block with this hash until `drop`; None: it is not here."""
        block_id = self._findable.get(block_hash)
        if block_id is not None:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1
        return block_id

    def take(self, num_blocks: int) -> list[int]:
        """Reference free blocks, to be filled, until `drop`; at most half of the free ones."""
        return [self._take_free() for _ in range(min(num_blocks, len(self._free) // 2))]

    def adopt(self, block_id: int, block_hash: bytes) -> None:
        """Make a block findable that `take` returned and that was filled with this content."""
        self._register(block_id, block_hash)

    def drop(self, block_ids: Iterable[int]) -> None:
        """Give up references of `hold` and `take`."""
        for block_id in block_ids:
            self._release(block_id)

    def free(self, request: Request) -> None:
        """Drop the request's references and clear block_ids; harmless when it holds none."""
        # NOTE: last block first, so that a shared prefix is evicted last.
        for block_id in reversed(request.block_ids):
            self._release(block_id)
        request.block_ids = []

    def quarantine(self, request: Request) -> list[int]:
        """Take the blocks that a remote writer may still touch out of circulation; return them.

        Those are the blocks that were never registered as computed, which only the request itself
        can hold. Its other blocks are freed. Clears block_ids.
        """
        quarantined = []
        for block_id in reversed(request.block_ids):
            if self._hashes[block_id] is None:
                assert self._ref_counts[block_id] == 1, f"block {block_id} is shared, not computed"
                self._ref_counts[block_id] = 0
                self._quarantined.add(block_id)
                quarantined.append(block_id)
            else:
                self._release(block_id)
        request.block_ids = []
        return quarantined[::-1]

    def release_quarantined(self, block_ids: Iterable[int]) -> None:
        """Return quarantined blocks to the pool: no writer can touch them any more.

        Raises: ValueError: a block is not quarantined; the ones before it were released.
        """
        for block_id in block_ids:
            if block_id not in self._quarantined:
                raise ValueError(f"block {block_id} is not quarantined")
            self._quarantined.remove(block_id)
            self._put_free(block_id)

    def check_integrity(self, requests: Iterable[Request] | None = None) -> None:
        """Assert that every block is exactly one of free, referenced and quarantined.

        With `requests`, all that hold blocks: the reference counts equal what they hold.
        """
        for block_id in range(self.num_blocks):
            states = (
                block_id in self._free,
                self._ref_counts[block_id] > 0,
                block_id in self._quarantined,
            )
            assert sum(states) == 1, f"block {block_id}: free, referenced, quarantined = {states}"
            assert self._ref_counts[block_id] >= 0, f"block {block_id} has a negative ref_count"
            if block_id in self._quarantined:
                assert self._hashes[block_id] is None, f"quarantined block {block_id} is cached"
        for block_hash, block_id in self._findable.items():
            assert self._hashes[block_id] == block_hash, f"block {block_id} has another hash"
        if requests is None:
            return
        held = [0] * self.num_blocks
        for request in requests:
            assert len(set(request.block_ids)) == len(request.block_ids), f"{request.key}: repeated"
            for block_id in request.block_ids:
                held[block_id] += 1
        assert held == self._ref_counts, "reference counts differ from what the requests hold"

    def _register(self, block_id: int, block_hash: bytes) -> None:
        self._hashes[block_id] = block_hash
        if block_hash not in self._findable:
            self._findable[block_hash] = block_id
            for journal in self._journals:
                journal.stored(block_hash)

    def _max_cached_blocks(self, num_tokens: int) -> int:
        return max(num_tokens - 1, 0) // self.block_size

    def _match_request(self, request: Request) -> list[int]:
        if request.sampling.num_prompt_logprobs is not None:
            return []
        self._extend_hashes(request)
        return self._find(request.block_hashes[: self._max_cached_blocks(request.num_tokens)])

    def _find(self, hashes: Sequence[bytes]) -> list[int]:
        block_ids = []
        for block_hash in hashes:
            block_id = self._findable.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def _extend_hashes(self, request: Request) -> None:
        hashes, size = request.block_hashes, self.block_size
        parent = hashes[-1] if hashes else root_hash(request.cache_salt)
        for index in range(len(hashes), request.num_tokens // size):
            parent = hash_block(parent, request.token_ids[index * size : (index + 1) * size])
            hashes.append(parent)

    def _take_free(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        self._forget(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            if self._findable.get(block_hash) == block_id:
                del self._findable[block_hash]
                for journal in self._journals:
                    journal.removed(block_hash)
            self._hashes[block_id] = None

    def _release(self, block_id: int) -> None:
        assert self._ref_counts[block_id] > 0, f"block {block_id} is released twice"
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            self._put_free(block_id)

    def _put_free(self, block_id: int) -> None:
        self._free[block_id] = None
        block_hash = self._hashes[block_id]
        if block_hash is None or self._findable.get(block_hash) != block_id:
            self._forget(block_id)
            self._free.move_to_end(block_id, last=False)
