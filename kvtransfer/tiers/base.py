"""What a place for prefix blocks has to offer, and several of them in a row.

A block is named by its hash (see docs/kv-layout.md) and holds all layers and parts of one rank, one
after the other. Names are only unique within a namespace: the same layout, model and weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class TierCounters:
    """Of one tier since the start of the process."""

    num_read: int = 0
    """Blocks."""
    num_written: int = 0
    """Blocks."""
    num_corrupt: int = 0
    """Blocks that were truncated or changed, and were dropped."""
    num_failures: int = 0
    """Reads and writes that the storage refused."""
    num_evicted: int = 0
    """Blocks that made room, as far as this process did it."""


class Tier(Protocol):
    """Used by one thread at a time. A failing storage is a miss, never an error of the caller."""

    name: str
    counters: TierCounters

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        """Which blocks can be read, most likely."""
        ...

    def read(self, block_hash: bytes, into: memoryview) -> bool:
        """Fill `into` with a block; False: it is not here, or not intact, and `into` is junk."""
        ...

    def write(self, block_hash: bytes, data: memoryview) -> bool:
        """Keep a block, which is copied. False: there is no room for it."""
        ...

    def num_used_bytes(self) -> int:
        """What it takes now; an estimate where others use it too."""
        ...

    def close(self) -> None:
        """Release what it took of this process. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class TierStack:
    """Tiers, fastest first."""

    tiers: tuple[Tier, ...]

    def locate(self, hashes: Sequence[bytes]) -> list[Tier]:
        """The fastest tier of each block, for as many of the first as are somewhere."""
        found: list[Tier | None] = [None] * len(hashes)
        for tier in self.tiers:
            missing = [index for index, at in enumerate(found) if at is None]
            if not missing:
                break
            present = tier.contains([hashes[index] for index in missing])
            for index, is_here in zip(missing, present, strict=True):
                if is_here:
                    found[index] = tier
        located: list[Tier] = []
        for at in found:
            if at is None:
                break
            located.append(at)
        return located

    def read(self, block_hash: bytes, into: memoryview) -> Tier | None:
        """Fill `into` from the fastest tier that has the block; None: none of them does."""
        for tier in self.tiers:
            if tier.read(block_hash, into):
                return tier
        return None

    def missing(self, block_hash: bytes) -> list[Tier]:
        """Tiers that a block should be written to."""
        return [tier for tier in self.tiers if not tier.contains([block_hash])[0]]

    def close(self) -> None:
        """Close all."""
        for tier in self.tiers:
            tier.close()
