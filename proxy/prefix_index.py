"""Which workers hold which prompt blocks."""

from collections import OrderedDict
from collections.abc import Sequence

Holder = tuple[str, int]
"""A worker's engine id and incarnation."""


class PrefixIndex:
    """Which workers were last seen with which prompt blocks; bounded, the oldest go first.

    What requests were seen to leave there is a hint; a worker's own events set it right.
    """

    def __init__(self, max_blocks: int = 65536) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, set[Holder]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, block_hashes: Sequence[bytes], identity: Holder) -> None:
        """Note that `identity` now holds these blocks."""
        for block_hash in block_hashes:
            self._holders.setdefault(block_hash, set()).add(identity)
            self._holders.move_to_end(block_hash)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def remove(self, block_hashes: Sequence[bytes], identity: Holder) -> None:
        """Note that `identity` does not hold these blocks any more."""
        for block_hash in block_hashes:
            holders = self._holders.get(block_hash)
            if holders is not None:
                holders.discard(identity)
                if not holders:
                    del self._holders[block_hash]

    def drop(self, identity: Holder) -> None:
        """Forget all that `identity` holds."""
        self.remove(list(self._holders), identity)

    def match(self, block_hashes: Sequence[bytes]) -> dict[Holder, int]:
        """Count the leading blocks that each worker probably holds."""
        matched: dict[Holder, int] = {}
        alive: set[Holder] | None = None
        for depth, block_hash in enumerate(block_hashes, start=1):
            holders = self._holders.get(block_hash)
            if holders is None:
                break
            alive = set(holders) if alive is None else alive & holders
            if not alive:
                break
            for identity in alive:
                matched[identity] = depth
        return matched
