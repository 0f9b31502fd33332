"""What the prefix cache of a worker finds, told to the proxies: numbered changes, and the whole of
it for one that asks.
"""

from collections import Counter
from collections.abc import Sequence

from protos import worker_pb2
from protos.block_hash import BLOCK_HASH_BYTES

TIER = "device"
MAX_SNAPSHOT_BLOCKS = 1 << 17
"""Two MiB of hashes: less than a message may have."""


class KVEventLog:
    """See BlockJournal. Collects changes between two messages; one of each block, the last.

    May be the journal of several pools: a block is removed when the last one has removed it.
    """

    def __init__(self) -> None:
        self._sequence = 0
        self._changes: dict[bytes, bool] = {}
        self._num_pools: Counter[bytes] = Counter()

    def stored(self, block_hash: bytes) -> None:
        """See BlockJournal."""
        self._num_pools[block_hash] += 1
        self._changes[block_hash] = True

    def removed(self, block_hash: bytes) -> None:
        """See BlockJournal."""
        self._num_pools[block_hash] -= 1
        if not self._num_pools[block_hash]:
            del self._num_pools[block_hash]
            self._changes[block_hash] = False

    def take(self) -> worker_pb2.KVEvents | None:
        """The changes since the last call, under the next number; None: there were none."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        self._sequence += 1
        return worker_pb2.KVEvents(
            sequence=self._sequence,
            tier=TIER,
            stored=b"".join(block_hash for block_hash, is_here in changes.items() if is_here),
            removed=b"".join(block_hash for block_hash, is_here in changes.items() if not is_here),
        )

    def snapshot(self, hashes: Sequence[bytes]) -> worker_pb2.KVEvents:
        """All that is found now; the next message that `take` returns goes on from it.

        hashes: of all pools; one that several find may be repeated.
        """
        # Changes that were not taken yet are in it too: to hear of them again changes nothing.
        assert all(len(block_hash) == BLOCK_HASH_BYTES for block_hash in hashes[:1])
        return worker_pb2.KVEvents(
            sequence=self._sequence,
            is_snapshot=True,
            tier=TIER,
            stored=b"".join(hashes[-MAX_SNAPSHOT_BLOCKS:]),
        )
