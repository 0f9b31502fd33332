"""The tiers of the ranks that share a pool: a block counts as found, loaded or copied once it is so
on all of them. Each keeps its own part of a block, in a namespace that it shares with the ranks of
other pools that hold the same part.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.tier_worker import Find, Job, Load, OnDone, TierJobs, TierWorker, Write
from engine.weights.fingerprint import fingerprint
from engine.worker.config import WorkerConfig
from engine.worker.ranks import Ranks
from kvtransfer.registration import KVMemory
from kvtransfer.tiers.base import TierStack
from kvtransfer.tiers.loading import load_tiers
from protos import ranks_pb2, worker_pb2

_LEADER = 0


def tier_worker(
    config: WorkerConfig, memory: KVMemory, role: worker_pb2.Role.ValueType
) -> TierWorker:
    """Open this rank's tiers."""
    stack = TierStack(())
    if config.tiers.is_on:
        # NOTE: the layout's digest tells ranks and numbers of ranks apart.
        stack = load_tiers(
            config.tiers,
            f"{memory.layout.digest}-{fingerprint(Path(config.model_path))}",
            host=config.transfer.host,
            with_host=role == worker_pb2.ROLE_PREFILLER,
        )
    return TierWorker(stack, memory)


@dataclass(slots=True)
class _Open:
    """A job that some rank has not done yet."""

    num_blocks: int
    """The least of what the others said."""
    ranks: set[int] = field(default_factory=set)


class TierRanks:
    """Implements TierJobs for one data-parallel rank of several ranks."""

    def __init__(
        self, own: TierJobs | None, ranks: Ranks, followers: Sequence[int], *, is_on: bool
    ) -> None:
        """own: of the leader, for its own data-parallel rank. is_on: whether tiers are wanted."""
        self._own = own
        self._ranks = ranks
        self._followers = followers
        self._is_on = is_on if own is None else own.is_on
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._on_done: OnDone | None = None

    @property
    def is_on(self) -> bool:
        """See TierJobs. A follower that could open none finds nothing, and so nothing is found."""
        return self._is_on

    def start(self, on_done: OnDone) -> None:
        """See TierJobs."""
        self._on_done = on_done
        self._ranks.listen_tiers(self._take, self._followers)
        if self._own is not None:
            self._own.start(lambda number, num_blocks: self._done(_LEADER, number, num_blocks))

    def submit(self, number: int, job: Job) -> None:
        """See TierJobs."""
        num_blocks = 1 if isinstance(job, Write) else len(job.hashes)
        with self._lock:
            members = self._followers if self._own is None else (_LEADER, *self._followers)
            self._open[number] = _Open(num_blocks, set(members))
        command = ranks_pb2.RankCommand(tier_job=job_to_proto(number, job))
        self._ranks.send(command, self._followers)
        if self._own is not None:
            self._own.submit(number, job)

    def stats(self) -> list[worker_pb2.TierStats]:
        """See TierJobs; of the leader's rank alone."""
        return [] if self._own is None else self._own.stats()

    def close(self) -> None:
        """See TierJobs; followers close theirs when they are told to stop."""
        if self._own is not None:
            self._own.close()

    def _take(self, rank: int, done: ranks_pb2.TierJobDone) -> None:
        self._done(rank, done.number, done.num_blocks)

    def _done(self, rank: int, number: int, num_blocks: int) -> None:
        with self._lock:
            job = self._open[number]
            job.ranks.discard(rank)
            job.num_blocks = min(job.num_blocks, num_blocks)
            if job.ranks:
                return
            del self._open[number]
        assert self._on_done is not None, "start comes first"
        self._on_done(number, job.num_blocks)


def job_to_proto(number: int, job: Job) -> ranks_pb2.TierJob:
    """A job on the wire."""
    match job:
        case Find(hashes):
            return ranks_pb2.TierJob(number=number, find=True, hashes=hashes)
        case Load(hashes, block_ids):
            return ranks_pb2.TierJob(number=number, hashes=hashes, block_ids=block_ids)
        case Write(block_hash, block_id):
            return ranks_pb2.TierJob(
                number=number, write=True, hashes=[block_hash], block_ids=[block_id]
            )


def job_from_proto(message: ranks_pb2.TierJob) -> Job:
    """Inverse of `job_to_proto`."""
    hashes, block_ids = tuple(message.hashes), tuple(message.block_ids)
    if message.find:
        return Find(hashes)
    return Write(hashes[0], block_ids[0]) if message.write else Load(hashes, block_ids)
