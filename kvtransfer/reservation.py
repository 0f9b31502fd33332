"""What one reader rank knows about one key: the blocks, the writer ranks that fill them, and which
of these are through.

A reservation is complete when every needed rank has ended well. The first failure, a broken link or
a cancel ends it; it is quiet when no rank that was granted can write any more.
"""

import enum
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvtransfer.verification import Verification

WriterT = TypeVar("WriterT")


class PartState(enum.Enum):
    """Of one writer rank for one key."""

    WRITING = "writing"
    VERIFYING = "verifying"
    QUARANTINED = "quarantined"
    """Its link broke; what it had on the way may still land."""
    OVER = "over"


@dataclass(slots=True, eq=False)
class Part(Generic[WriterT]):
    """The grant of one writer rank."""

    writer: WriterT
    state: PartState = PartState.WRITING
    verification: Verification | None = None
    """Made by the thread that verifies, when it is first needed."""


@dataclass(slots=True, eq=False)
class Reservation(Generic[WriterT]):
    """See the module's docstring. Not thread-safe: its owner holds a lock."""

    block_ids: tuple[int, ...]
    first_block: int
    num_tokens: int
    engine_id: str = ""
    """Of the writer, once its first rank was granted."""
    needed_ranks: frozenset[int] = frozenset()
    parts: dict[int, Part[WriterT]] = field(default_factory=dict)
    """By rank of the writer in its engine."""
    is_cancelled: bool = False
    is_failed: bool = False

    @property
    def is_ended(self) -> bool:
        """Whether it can only become quiet."""
        return self.is_cancelled or self.is_failed

    @property
    def is_complete(self) -> bool:
        """Whether every needed rank ended; well, unless is_ended."""
        return (
            bool(self.parts)
            and self.needed_ranks <= self.parts.keys()
            and all(part.state is PartState.OVER for part in self.parts.values())
        )

    @property
    def is_quiet(self) -> bool:
        """Whether no rank that was granted can write any more."""
        return all(part.state is PartState.OVER for part in self.parts.values())

    def refusal(self, engine_id: str, rank: int, needed_ranks: frozenset[int]) -> str:
        """Why this rank may not write; empty if it may."""
        if self.is_ended:
            return "these blocks are not expected (any more)"
        if rank in self.parts or (
            self.parts and (engine_id, needed_ranks) != (self.engine_id, self.needed_ranks)
        ):
            return "another writer has the grant"
        return ""

    def grant(
        self, writer: WriterT, engine_id: str, rank: int, needed_ranks: frozenset[int]
    ) -> None:
        """Let a rank write; `refusal` was empty."""
        self.engine_id = engine_id
        self.needed_ranks = needed_ranks
        self.parts[rank] = Part(writer)

    def writing(self) -> list[WriterT]:
        """Writers that have to be told of an end."""
        return [part.writer for part in self.parts.values() if part.state is PartState.WRITING]
