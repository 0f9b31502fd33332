"""Sender and Receiver of a data-parallel rank: those of the ranks that share its layers, one of
which may be the leader's own.

A transfer is over when it is over on every rank; KV has arrived when every rank has its part. What
the loop sees is what one Sender or Receiver would report.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from engine.parallel_config import ParallelConfig
from engine.request import RequestKey
from engine.worker.config import WorkerConfig
from engine.worker.convert import key_from_proto, key_to_proto
from engine.worker.leading_model import followers_of
from engine.worker.rank_part import Leading
from engine.worker.ranks import Ranks
from kvtransfer.connector import (
    BlockCopy,
    KVArrived,
    KVFailed,
    KVQuiet,
    ReceiveEvent,
    Receiver,
    Sender,
    Transfer,
    TransferResult,
)
from protos import ranks_pb2, worker_pb2

OnLayer = Callable[[int], None]
OnDone = Callable[[TransferResult], None]
_LEADER = 0


class EngineTransfer:
    """A transfer by all ranks of a data-parallel one; see kvtransfer.Transfer."""

    def __init__(
        self, key: RequestKey, ranks: Ranks | None, followers: Collection[int], on_done: OnDone
    ) -> None:
        self.key = key
        self.block_indices = range(0)
        """Numbers of the writer's blocks of the prompt that some rank of the target wants."""
        self.own: Transfer | None = None
        """The leader's, if it takes part."""
        self._ranks = ranks
        self._followers = followers
        self._on_done = on_done
        self._lock = threading.Lock()
        self._num_open = len(followers)
        self._results: list[TransferResult] = []

    def begin(self, sender: Sender | None, target: worker_pb2.KVTarget) -> None:
        """Start every part; `sender`: the leader's, if it takes part."""
        self._num_open += sender is not None
        begin = ranks_pb2.BeginTransfer(key=key_to_proto(self.key), target=target)
        self._tell(ranks_pb2.RankCommand(begin_transfer=begin))
        if sender is not None:
            self.own = sender.begin(self.key, target, self.on_rank_done)

    def finish(self) -> None:
        """State that nothing more will be pushed."""
        finish = ranks_pb2.FinishTransfer(key=key_to_proto(self.key))
        self._tell(ranks_pb2.RankCommand(finish_transfer=finish))
        if self.own is not None:
            self.own.finish()

    def withdraw(self, reason: str) -> None:
        """End it: nobody needs it any more."""
        abort = ranks_pb2.AbortTransfer(key=key_to_proto(self.key), reason=reason)
        self._tell(ranks_pb2.RankCommand(abort_transfer=abort))
        if self.own is not None:
            self.own.withdraw(reason)

    def on_rank_done(self, result: TransferResult) -> None:
        """One rank's part is over; any thread."""
        with self._lock:
            self._results.append(result)
            if len(self._results) < self._num_open:
                return
        failed = [r for r in self._results if not r.ok]
        self._on_done(
            TransferResult(
                key=self.key,
                ok=not failed,
                error=failed[0].error if failed else "",
                num_bytes=sum(r.num_bytes for r in self._results),
                num_blocks=max(r.num_blocks for r in self._results),
            )
        )

    def _tell(self, command: ranks_pb2.RankCommand) -> None:
        if self._ranks is not None:
            self._ranks.send(command, self._followers)


class EngineSender:
    """The writers of all ranks of a data-parallel one; used by the loop thread."""

    def __init__(
        self,
        dp_rank: int,
        sender: Sender | None,
        leading: Leading | None,
        config: WorkerConfig,
    ) -> None:
        """sender: the leader's, for its own data-parallel rank."""
        self._dp_rank = dp_rank
        self._sender = sender
        self._block_size = config.block_size
        self._model = leading.model if leading else None
        self._ranks = leading.ranks if leading else None
        self._followers = followers_of(config.parallel, dp_rank)
        self._transfers: dict[RequestKey, EngineTransfer] = {}
        self._lock = threading.Lock()
        if self._ranks is not None:
            self._ranks.listen(self._take, self._followers)

    def begin(
        self, key: RequestKey, target: worker_pb2.KVTarget, on_done: OnDone
    ) -> EngineTransfer:
        """See Sender.begin."""

        def conclude(result: TransferResult) -> None:
            with self._lock:
                self._transfers.pop(key, None)
            on_done(result)

        transfer = EngineTransfer(key, self._ranks, self._followers, conclude)
        transfer.block_indices = _wanted_blocks(target, self._block_size)
        with self._lock:
            self._transfers[key] = transfer
        transfer.begin(self._sender, target)
        return transfer

    def pusher(self, pushes: Sequence[tuple[EngineTransfer, Sequence[BlockCopy]]]) -> OnLayer:
        """What the next forward pass has to call once a layer is written; the same for all layers.

        Followers push their parts in their own forward pass.
        """
        if self._model is not None:
            self._model.push_with_next(
                self._dp_rank,
                [
                    ranks_pb2.Push(
                        key=key_to_proto(transfer.key),
                        block_ids=[copy.source_block_id for copy in copies],
                        block_indices=[copy.block_index for copy in copies],
                    )
                    for transfer, copies in pushes
                ],
            )
        if self._sender is None:
            return _push_nothing
        return self._sender.pusher(
            [
                (own, [copy for copy in copies if copy.block_index in own.block_indices])
                for transfer, copies in pushes
                if (own := transfer.own) is not None
            ]
        )

    def stats(self) -> list[worker_pb2.TransferPeerStats]:
        """Of the leader's rank, if it is one of these."""
        return [] if self._sender is None else self._sender.stats()

    def _take(self, rank: int, event: ranks_pb2.RankEvent) -> None:
        assert event.WhichOneof("event") == "transfer_ended", f"rank {rank} sent {event}"
        ended = event.transfer_ended
        key = key_from_proto(ended.key)
        with self._lock:
            transfer = self._transfers[key]
        transfer.on_rank_done(
            TransferResult(key, not ended.error, ended.error, ended.num_bytes, ended.num_blocks)
        )


def _push_nothing(layer_idx: int) -> None:
    """The leader has no part in these transfers."""


def _wanted_blocks(target: worker_pb2.KVTarget, block_size: int) -> range:
    """The writer's blocks that hold what the reader wants of the prompt."""
    target_size = target.block_size or block_size
    num_tokens = target.num_tokens or (target.first_block + len(target.block_ids)) * target_size
    return range(target.first_block * target_size // block_size, -(-num_tokens // block_size))


@dataclass(slots=True, eq=False)
class _Arrival:
    """What the ranks have said about one key."""

    arrived: set[int] = field(default_factory=set)
    settled: set[int] = field(default_factory=set)
    """Ranks into whose blocks nobody writes any more and that owe no KVQuiet."""
    cancelled: set[int] = field(default_factory=set)
    """Ranks that owe one KVQuiet."""
    failed: bool = False
    given_up: bool = False
    """By the loop, which waits for KVQuiet."""


class EngineReceiver:
    """The readers of all ranks of a data-parallel one."""

    def __init__(
        self,
        dp_rank: int,
        leading: Leading | None,
        config: ParallelConfig,
        emit: Callable[[ReceiveEvent], None],
    ) -> None:
        """`emit` must be cheap; it is called in the order of events, from several threads."""
        self._own: Receiver | None = None
        self._ranks = ranks = leading.ranks if leading else None
        self._emit = emit
        self._followers = set(followers_of(config, dp_rank))
        self._all = self._followers | ({_LEADER} if dp_rank == 0 else set())
        self._lock = threading.RLock()
        self._arrivals: dict[RequestKey, _Arrival] = {}
        if ranks is not None:
            ranks.listen(self._take, self._followers)

    def lead(self, receiver: Receiver) -> None:
        """Take the leader's own, which reports to `on_own_event`, before anything is expected."""
        assert _LEADER in self._all, "the leader is of another data-parallel rank"
        self._own = receiver

    def expect(
        self,
        key: RequestKey,
        block_ids: Sequence[int],
        *,
        first_block: int,
        num_tokens: int,
    ) -> None:
        """See Receiver.expect."""
        with self._lock:
            self._arrivals[key] = _Arrival()
        if self._ranks is not None:
            expect = ranks_pb2.Expect(
                key=key_to_proto(key),
                block_ids=block_ids,
                first_block=first_block,
                num_tokens=num_tokens,
            )
            self._ranks.send(ranks_pb2.RankCommand(expect=expect), self._followers)
        if self._own is not None:
            self._own.expect(key, block_ids, first_block=first_block, num_tokens=num_tokens)

    def cancel(self, key: RequestKey) -> None:
        """See Receiver.cancel: exactly one KVQuiet follows."""
        with self._lock:
            arrival = self._arrivals.setdefault(key, _Arrival())
            if not arrival.failed:
                arrival.given_up = True
                self._cancel_ranks(key, arrival, self._all - arrival.cancelled)

    def stats(self) -> list[worker_pb2.TransferPeerStats]:
        """Of the leader's rank, if it is one of these."""
        return [] if self._own is None else self._own.stats().transfers

    def on_own_event(self, event: ReceiveEvent) -> None:
        """What the leader's own Receiver reports."""
        self._on_event(_LEADER, event)

    def _take(self, rank: int, event: ranks_pb2.RankEvent) -> None:
        match event.WhichOneof("event"):
            case "arrived":
                self._on_event(rank, KVArrived(key_from_proto(event.arrived.key)))
            case "not_arriving":
                failed = event.not_arriving
                key = key_from_proto(failed.key)
                reason = f"rank {rank}: {failed.reason}"
                self._on_event(rank, KVFailed(key, reason, failed.quiet, failed.withdrawn))
            case "quiet":
                self._on_event(rank, KVQuiet(key_from_proto(event.quiet.key)))
            case kind:
                raise AssertionError(f"rank {rank} sent {kind}")

    def _on_event(self, rank: int, event: ReceiveEvent) -> None:
        with self._lock:
            arrival = self._arrivals.get(event.key)
            if arrival is None:
                return
            match event:
                case KVArrived():
                    arrival.arrived.add(rank)
                    if rank not in arrival.cancelled:
                        arrival.settled.add(rank)
                case KVFailed():
                    self._on_failed(rank, arrival, event)
                    return
                case KVQuiet():
                    arrival.settled.add(rank)
            self._conclude(event.key, arrival)

    def _on_failed(self, rank: int, arrival: _Arrival, event: KVFailed) -> None:
        key = event.key
        if event.quiet and rank not in arrival.cancelled:
            arrival.settled.add(rank)
        if arrival.failed or arrival.given_up:
            self._conclude(key, arrival)
            return
        arrival.failed = True
        is_quiet = arrival.settled == self._all
        # NOTE: said before the others can answer, so that KVQuiet comes after it.
        self._emit(replace(event, quiet=is_quiet))
        if is_quiet:
            del self._arrivals[key]
            return
        self._cancel_ranks(key, arrival, self._all - arrival.settled - {rank})

    def _conclude(self, key: RequestKey, arrival: _Arrival) -> None:
        if arrival.failed or arrival.given_up:
            if arrival.settled == self._all:
                del self._arrivals[key]
                self._emit(KVQuiet(key))
        elif arrival.arrived == self._all:
            del self._arrivals[key]
            self._emit(KVArrived(key))

    def _cancel_ranks(self, key: RequestKey, arrival: _Arrival, ranks: set[int]) -> None:
        arrival.cancelled |= ranks
        arrival.settled -= ranks
        followers = ranks - {_LEADER}
        if followers and self._ranks is not None:
            cancel = ranks_pb2.CancelExpected(key=key_to_proto(key))
            self._ranks.send(ranks_pb2.RankCommand(cancel_expected=cancel), followers)
        if _LEADER in ranks and self._own is not None:
            self._own.cancel(key)
