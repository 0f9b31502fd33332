"""What a reader counts."""

from collections import Counter
from dataclasses import dataclass, field

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
class PeerCounters:
    """Of one rank of a writer."""

    transport: str = ""
    num_transfers: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_failures: int = 0


@dataclass(slots=True)
class Counters:
    """Of a reader since its start."""

    num_stale: int = 0
    num_arrived: int = 0
    num_withdrawn: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    peers: dict[tuple[str, int], PeerCounters] = field(default_factory=dict)
    """By engine id and rank."""
