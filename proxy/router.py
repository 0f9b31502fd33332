"""Choose a worker for a piece of work: filter, score, pick; pure functions on snapshots.

Scores are in tokens of prefill work: what is queued, what the prompt adds after its cached
prefix, what running sequences slow down. The lowest wins.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from protos import worker_pb2
from protos.block_hash import hash_blocks
from proxy.prefix_index import PrefixIndex
from proxy.session import Identity

_TOKENS_PER_ACTIVE_SEQUENCE = 32.0
_TOKENS_PER_FULL_POOL = 4096.0
_TOKENS_PER_FAILURE = 1e6
# A shared chat-template preamble must not pull every request to one worker.
_MIN_MATCHED_SHARE = 0.5
_MIN_MATCHED_TOKENS = 128
# A decoder helps a prefiller out when a queue is worth it, and few streams would notice.
_MIN_QUEUED_TOKENS = 256
_MAX_HELPER_SEQUENCES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSnapshot:
    """What the proxy knows about a connected worker at this moment."""

    identity: Identity
    role: "worker_pb2.Role.ValueType"
    is_draining: bool = False
    num_active: int = 0
    """Sequences it serves, of this proxy or as it reports, whichever is more."""
    num_pending_tokens: int = 0
    """Prompt tokens it still has to compute."""
    kv_usage: float = 0.0
    """Share of its blocks that are held, 0..1."""
    block_size: int = 32
    max_model_len: int = 0
    """Tokens that one request may have there; 0: as many as it likes."""
    kv_identity: str = ""
    """Model and quantisation: part of the salt of its block hashes."""

    def can_hold(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens, and one more, has room there."""
        return not self.max_model_len or num_tokens < self.max_model_len


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The work to place."""

    request_id: str
    num_tokens: int
    matched_tokens: Mapping[Identity, int]
    """Tokens of its prefix that each worker probably holds."""
    num_failures: Mapping[Identity, int]
    """How often each worker failed this request."""
    seen: Collection[Identity] = ()
    """Workers that this proxy has used; any other one has an empty cache to fill."""


def choose(
    workers: Sequence[WorkerSnapshot],
    role: "worker_pb2.Role.ValueType",
    candidate: Candidate,
    *,
    max_failures: int,
    excluded: Collection[Identity] = (),
) -> Identity | None:
    """Pick the worker of `role` with the lowest score; None when the filter leaves none.

    Ties are broken by a hash of the request id, so equal workers share the load.
    """
    fitting = [
        worker
        for worker in workers
        if worker.role == role
        and not worker.is_draining
        and worker.can_hold(candidate.num_tokens)
        and worker.identity not in excluded
        and candidate.num_failures.get(worker.identity, 0) < max_failures
    ]
    if not fitting:
        return None
    best = min(fitting, key=lambda worker: (score(worker, candidate), _lot(worker, candidate)))
    return best.identity


def score(worker: WorkerSnapshot, candidate: Candidate) -> float:
    """Expected cost of placing `candidate` at `worker`; lower is better.

    A worker that was never used counts as if it held the prompt: otherwise one that comes back
    after a crash would get nothing as long as the others hold every popular prefix.
    """
    matched = candidate.matched_tokens.get(worker.identity, 0)
    if worker.identity not in candidate.seen:
        matched = candidate.num_tokens
    elif matched < max(_MIN_MATCHED_TOKENS, candidate.num_tokens * _MIN_MATCHED_SHARE):
        matched = 0
    return (
        worker.num_pending_tokens
        + candidate.num_tokens
        - matched
        + worker.num_active * _TOKENS_PER_ACTIVE_SEQUENCE
        + worker.kv_usage**2 * _TOKENS_PER_FULL_POOL
        + candidate.num_failures.get(worker.identity, 0) * _TOKENS_PER_FAILURE
    )


def helps_out(decoder: WorkerSnapshot, prefiller: WorkerSnapshot, num_uncached: int) -> bool:
    """Whether a decoder should compute a prompt itself because the prefiller has a queue.

    It computes one at a time, in chunks beside its decode steps, at about half the prefiller's
    speed: worth it once the prompt would wait for half as much as it has itself.
    """
    return (
        prefiller.num_pending_tokens >= max(_MIN_QUEUED_TOKENS, num_uncached // 2)
        and decoder.num_pending_tokens == 0
        and decoder.num_active <= _MAX_HELPER_SEQUENCES
    )


def _lot(worker: WorkerSnapshot, candidate: Candidate) -> int:
    return xxhash.xxh3_64_intdigest(f"{candidate.request_id}/{worker.identity}".encode())


class Router:
    """Placement with memory: the prefix index of this proxy."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self._seen: set[Identity] = set()

    def hash_prompt(self, token_ids: Sequence[int], block_size: int, salt: str) -> list[bytes]:
        """Hashes of the full blocks of a prompt, for `candidate` and `note`."""
        return hash_blocks(token_ids, block_size, salt)

    def candidate(
        self,
        request_id: str,
        num_tokens: int,
        block_hashes: Sequence[bytes],
        block_size: int,
        num_failures: Mapping[Identity, int],
    ) -> Candidate:
        """Describe work for `choose`, with what the index knows about its prefix."""
        matched = self.index.match(block_hashes)
        return Candidate(
            request_id=request_id,
            num_tokens=num_tokens,
            matched_tokens={who: depth * block_size for who, depth in matched.items()},
            num_failures=num_failures,
            seen=self._seen,
        )

    def note(self, block_hashes: Sequence[bytes], identity: Identity) -> None:
        """Remember that `identity` computed or received these blocks."""
        self._seen.add(identity)
        self.index.add(block_hashes, identity)
