"""What a reader counts."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kvtransfer.peers import PeerCounters
from kvtransfer.reservation import Reservation
from protos import worker_pb2


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """What the reader holds and what it has seen."""

    num_expected: int
    """Keys that no writer was granted yet."""
    num_granted: int
    """Keys that a writer may write, or whose checksums are being verified."""
    num_quarantined: int
    """Keys that were given up and are not quiet yet."""
    num_quarantined_blocks: int
    num_stale: int
    """Messages that were late, repeated or about an unknown key."""
    num_arrived: int
    num_withdrawn: int
    """Ended by a writer that was told that nobody needs them; no failures."""
    failures: dict[str, int]
    """By reason: incomplete, checksum, link."""
    transfers: list[worker_pb2.TransferPeerStats]
    """Per rank of each writer."""


@dataclass(slots=True)
class Counters:
    """Of a reader since its start."""

    num_stale: int = 0
    num_arrived: int = 0
    num_withdrawn: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    peers: dict[tuple[str, int], PeerCounters] = field(default_factory=dict)
    """By engine id and rank."""

    def report(self, reservations: Collection[Reservation[Any]]) -> ReceiverStats:
        """With what is held now."""
        quarantined = [r for r in reservations if r.is_ended]
        num_begun = sum(bool(r.parts) for r in reservations)
        return ReceiverStats(
            num_expected=len(reservations) - num_begun,
            num_granted=num_begun - len(quarantined),
            num_quarantined=len(quarantined),
            num_quarantined_blocks=sum(len(r.block_ids) for r in quarantined),
            num_stale=self.num_stale,
            num_arrived=self.num_arrived,
            num_withdrawn=self.num_withdrawn,
            failures=dict(self.failures),
            transfers=[peer.to_proto(engine_id) for (engine_id, _), peer in self.peers.items()],
        )
