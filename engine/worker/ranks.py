"""The leader's side of an engine of several ranks: it starts the others and commands them.

    launch --> join --> welcome --> (loading) --> ready --> commands ... --> stop

An engine lives and dies as a whole: when a follower's connection ends, or a rank is late with a
step, `on_lost` is called with the reason, and the process is expected to end.
"""

import hmac
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.collectives import CollectiveCounters
from engine.parallel import Parallel, join, leave
from engine.worker.config import WorkerConfig
from engine.worker.watchdog import Progress, blame, first_late_stage
from engine.worker.wire import Wire, WireClosed
from protos import ranks_pb2, worker_pb2

_JOIN_TIMEOUT_S = 120.0
_LOAD_TIMEOUT_S = 3600.0
_WATCH_INTERVAL_S = 0.5
_PONG_TIMEOUT_S = 1.0
_STOP_TIMEOUT_S = 5.0

FOLLOWER = "engine.worker.follower"
"""A follower without graphs."""

_log = logging.getLogger(__name__)

OnEvent = Callable[[int, ranks_pb2.RankEvent], None]
"""on_event(rank, event): from the thread that reads the rank's connection."""
OnTierJob = Callable[[int, ranks_pb2.TierJobDone], None]


def _ignore(rank: int, event: ranks_pb2.RankEvent | ranks_pb2.TierJobDone) -> None:
    """Until somebody listens."""


class Launcher(Protocol):
    """Starts the processes of followers."""

    def launch(self, rank: int, address: str, token: str, follower: str) -> None:
        """Start rank `rank`, which joins the leader at `address`; return at once.

        follower: the module whose be_follower it runs.
        """
        ...

    def close(self) -> None:
        """Wait for the processes, which are about to end, and end those that do not."""
        ...

    def kill(self) -> None:
        """End them now."""
        ...


@dataclass(slots=True, eq=False)
class _Follower:
    rank: int
    wire: Wire
    progress: Progress
    has_loaded: bool = False
    """Or failed to."""
    error: str = ""
    link_address: str = ""
    on_event: OnEvent = field(default=_ignore)
    on_tier_job: OnTierJob = field(default=_ignore)
    on_ended: Callable[[int], None] | None = None
    busy_s: float = 0.0


class Ranks:
    """All followers of this engine. Commands reach every follower in the order they were sent."""

    def __init__(
        self,
        config: WorkerConfig,
        role: worker_pb2.Role.ValueType,
        incarnation: int,
        launcher: Launcher,
        on_lost: Callable[[str], None],
        follower: str = FOLLOWER,
    ) -> None:
        """Start the followers and wait until they have joined.

        follower: the module that they run.
        Raises: TimeoutError: not all did in time.
        """
        self._config = config
        self._launcher = launcher
        self._follower = follower
        self._on_lost = on_lost
        self._followers: dict[int, _Follower] = {}
        self._loaded: queue.SimpleQueue[_Follower] = queue.SimpleQueue()
        self._step = 0
        self._own = Progress(0)
        self._parallel = Parallel()
        self._collectives_before = 0
        self._closing = threading.Event()
        self._store = TCPStore(config.host, 0, None, True, wait_for_workers=False)
        try:
            self._meet(role, incarnation)
        except BaseException:
            self.close()
            raise
        for joined in self._followers.values():
            threading.Thread(
                target=self._read, args=(joined,), name=f"rank-{joined.rank}", daemon=True
            ).start()
        threading.Thread(target=self._watch, name="rank-watchdog", daemon=True).start()

    def join(self, backend: str) -> Parallel:
        """Build this rank's groups, with the followers."""
        timeout_s = 2 * self._config.rank_timeout_s  # the watchdog speaks first
        self._parallel = join(
            self._config.parallel, self._store, backend=backend, timeout_s=timeout_s
        )
        return self._parallel

    def wait_ready(self) -> list[str]:
        """Wait until every follower has loaded; the addresses of their KVLink services.

        Raises: RuntimeError: one could not load; says which and why.
        """
        deadline_s = time.monotonic() + _LOAD_TIMEOUT_S
        # NOTE: whichever comes first. The one that failed may be the only one that ever says so.
        for _ in self._followers:
            try:
                follower = self._loaded.get(timeout=max(deadline_s - time.monotonic(), 0.01))
            except queue.Empty:
                missing = sorted(f.rank for f in self._followers.values() if not f.has_loaded)
                raise RuntimeError(
                    f"ranks {missing} have not loaded within {_LOAD_TIMEOUT_S} s"
                ) from None
            if follower.error:
                raise RuntimeError(f"rank {follower.rank}: {follower.error}")
        return [f.link_address for _, f in sorted(self._followers.items())]

    def listen(self, on_event: OnEvent, ranks: Collection[int]) -> None:
        """Pass what these followers' transfers report to on_event."""
        for rank in ranks:
            self._followers[rank].on_event = on_event

    def listen_steps(self, rank: int, on_ended: Callable[[int], None]) -> None:
        """Call on_ended with the number of each step that this follower has ended."""
        self._followers[rank].on_ended = on_ended

    def listen_tiers(self, on_done: OnTierJob, ranks: Collection[int]) -> None:
        """Pass what the tiers of these followers report to on_done."""
        for rank in ranks:
            self._followers[rank].on_tier_job = on_done

    def send(self, command: ranks_pb2.RankCommand, ranks: Collection[int]) -> None:
        """Command these followers; returns at once unless their buffers are full."""
        frame = command.SerializeToString()
        for rank in ranks:
            with suppress(WireClosed):  # whoever reads the connection sees its end
                self._followers[rank].wire.send(frame)

    def send_steps(self, steps: Sequence[tuple[Collection[int], ranks_pb2.RankCommand]]) -> int:
        """Command what ranks compute together, each of them one of the commands, and watch that it
        comes to an end. Numbers the commands, and returns their number.
        """
        now_s = time.monotonic()
        self._step += 1
        self._collectives_before = self._parallel.counters.num_calls
        for ranks, command in steps:
            step = command.forward if command.HasField("forward") else command.logits
            step.step = self._step
            for rank in ranks:
                self._followers[rank].progress.give(self._step, now_s)
            self.send(command, ranks)
        return self._step

    def end_own_step(self, step: int) -> None:
        """The leader has computed its part of a step that later stages go on with."""
        self._own.done, self._own.since_s = step, time.monotonic()

    @property
    def others(self) -> Sequence[int]:
        """The followers' ranks."""
        return sorted(self._followers)

    @property
    def collectives(self) -> list[worker_pb2.CollectiveCount]:
        """Every rank's totals, the leader's first."""
        found = collectives_to_proto(0, self._parallel.counters)
        for rank in self.others:
            found.extend(self._followers[rank].progress.collectives)
        return found

    @property
    def busy_s(self) -> list[float]:
        """Time that each follower has computed in steps, without waiting for the stage before."""
        return [self._followers[rank].busy_s for rank in self.others]

    def close(self) -> None:
        """Stop the followers; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.send(ranks_pb2.RankCommand(stop=ranks_pb2.StopRank()), self.others)
        leave()
        self._launcher.close()
        for follower in self._followers.values():
            follower.wire.close()

    def _meet(self, role: worker_pb2.Role.ValueType, incarnation: int) -> None:
        config, size = self._config, self._config.parallel.world_size
        deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
        with socket.create_server((config.host, 0)) as server:
            address = f"{config.host}:{server.getsockname()[1]}"
            for rank in range(1, size):
                self._launcher.launch(rank, address, config.cluster_token, self._follower)
            while len(self._followers) < size - 1:
                missing = sorted(set(range(1, size)) - self._followers.keys())
                server.settimeout(max(deadline_s - time.monotonic(), 0.01))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    raise TimeoutError(
                        f"ranks {missing} have not joined within {_JOIN_TIMEOUT_S} s"
                    ) from None
                self._welcome(Wire(connection), role, incarnation)

    def _welcome(self, wire: Wire, role: worker_pb2.Role.ValueType, incarnation: int) -> None:
        try:
            join = ranks_pb2.RankEvent.FromString(wire.receive(_STOP_TIMEOUT_S)).join
        except (WireClosed, TimeoutError):
            wire.close()
            return
        token, rank = self._config.cluster_token, join.rank
        if (
            not hmac.compare_digest(join.token.encode(), token.encode())
            or rank in self._followers
            or not 0 < rank < self._config.parallel.world_size
        ):
            _log.warning("refused a connection that said it was rank %d", rank)
            wire.close()
            return
        config = replace(self._config, parallel=replace(self._config.parallel, rank=rank))
        welcome = ranks_pb2.RankWelcome(
            worker_json=config.to_json(),
            role=role,
            incarnation=incarnation,
            store_host=self._config.host,
            store_port=self._store.port,
        )
        wire.send(ranks_pb2.RankCommand(welcome=welcome).SerializeToString())
        self._followers[rank] = _Follower(rank, wire, Progress(rank))

    def _read(self, follower: _Follower) -> None:
        try:
            while True:
                event = ranks_pb2.RankEvent.FromString(follower.wire.receive())
                self._take(follower, event)
        except WireClosed as error:
            if not follower.has_loaded:
                self._end_loading(follower, f"it ended while loading ({error})")
            elif not self._closing.is_set():
                self._on_lost(f"rank {follower.rank} is gone ({error})")

    def _take(self, follower: _Follower, event: ranks_pb2.RankEvent) -> None:
        match event.WhichOneof("event"):
            case "ready":
                follower.link_address = event.ready.link_address
                self._end_loading(follower)
            case "failed":
                self._end_loading(follower, event.failed.error)
            case "step" if event.step.done:
                follower.progress.collectives = event.step.collectives
                follower.progress.done = event.step.step
                follower.progress.since_s = time.monotonic()
                follower.busy_s = event.step.busy_s
                if follower.on_ended is not None:
                    follower.on_ended(event.step.step)
            case "step":
                follower.progress.received = event.step.step
            case "pong":
                follower.progress.num_collectives = event.pong.num_collectives
            case "progress":
                pass
            case "tier_job_done":
                follower.on_tier_job(follower.rank, event.tier_job_done)
            case _:
                follower.on_event(follower.rank, event)

    def _end_loading(self, follower: _Follower, error: str = "") -> None:
        follower.error, follower.has_loaded = error, True
        self._loaded.put(follower)

    def _watch(self) -> None:
        while not self._closing.wait(_WATCH_INTERVAL_S):
            if self._late():
                self._ask_late_ranks()
                # NOTE: a step may have ended meanwhile: slow is not stuck.
                if late := self._late():
                    self._on_lost(self._verdict(late))
                    return

    def _late(self) -> list[Progress]:
        now_s, timeout_s = time.monotonic(), self._config.rank_timeout_s
        size = self._config.parallel.stage_size
        stages: dict[int, list[Progress]] = {-1: []}
        for progress in (self._own, *(f.progress for f in self._followers.values())):
            stages.setdefault(progress.rank // size, []).append(progress)
        return [
            progress
            for stage, ranks in stages.items()
            for progress in ranks
            if progress is not self._own and progress.is_late(now_s, timeout_s, stages[stage - 1])
        ]

    def _ask_late_ranks(self) -> None:
        ping = ranks_pb2.RankCommand(ping=ranks_pb2.Ping())
        for progress in self._late():
            progress.num_collectives = None
            # NOTE: on a thread of its own: a rank that stands still may not even read.
            threading.Thread(target=self.send, args=(ping, [progress.rank]), daemon=True).start()
        self._closing.wait(_PONG_TIMEOUT_S)

    def _verdict(self, late: Sequence[Progress]) -> str:
        own = self._parallel.counters.num_calls - self._collectives_before
        size = self._config.parallel.stage_size
        behind = first_late_stage(late, size)
        blamed = blame(behind, own, leads=behind[0].rank < size)
        names = ", ".join(map(str, blamed))
        return (
            f"rank {names} is late: step {max(p.sent for p in late)} has not ended "
            f"within {self._config.rank_timeout_s} s"
        )


def collectives_to_proto(
    rank: int, counters: CollectiveCounters
) -> list[worker_pb2.CollectiveCount]:
    """Totals of one rank."""
    return [
        worker_pb2.CollectiveCount(rank=rank, kind=kind, num_calls=calls, num_bytes=num_bytes)
        for kind, (calls, num_bytes) in counters.snapshot().items()
    ]
