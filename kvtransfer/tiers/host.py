"""Blocks in the memory of this process."""

from collections import OrderedDict
from collections.abc import Sequence

from kvtransfer.tiers.base import TierCounters


class HostTier:
    """See Tier. Bounded; the least recently used block goes first."""

    name = "host"

    def __init__(self, max_bytes: int):
        self.counters = TierCounters()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        """See Tier."""
        return [block_hash in self._blocks for block_hash in hashes]

    def read(self, block_hash: bytes, into: memoryview) -> bool:
        """See Tier."""
        data = self._blocks.get(block_hash)
        if data is None or len(data) != len(into):
            return False
        self._blocks.move_to_end(block_hash)
        into[:] = data
        self.counters.num_read += 1
        return True

    def write(self, block_hash: bytes, data: memoryview) -> bool:
        """See Tier."""
        if len(data) > self._max_bytes:
            return False
        self._num_bytes -= len(self._blocks.pop(block_hash, b""))
        while self._num_bytes + len(data) > self._max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self._num_bytes -= len(oldest)
            self.counters.num_evicted += 1
        self._blocks[block_hash] = bytes(data)
        self._num_bytes += len(data)
        self.counters.num_written += 1
        return True

    def num_used_bytes(self) -> int:
        """See Tier."""
        return self._num_bytes

    def close(self) -> None:
        """See Tier."""
        self._blocks.clear()
        self._num_bytes = 0
