"""The leader and its followers: who may join, and who is blamed when a step does not end."""

import queue
import threading
from collections.abc import Iterator

import pytest

from engine.parallel_config import ParallelConfig
from engine.worker.config import WorkerConfig
from engine.worker.ranks import Ranks
from engine.worker.wire import Wire
from protos import ranks_pb2, worker_pb2

_TIMEOUT_S = 20.0
_CONFIG = WorkerConfig(
    engine_id="decoder-0",
    model_path="",
    model_name="m",
    cluster_token="secret",
    parallel=ParallelConfig(tp_size=3),
    rank_timeout_s=0.5,
)


class Followers:
    """Launches threads that join, say that they are ready, and then do as the test says."""

    def __init__(self) -> None:
        self.wires: dict[int, Wire] = {}
        self.configs: dict[int, WorkerConfig] = {}
        self._strangers: list[Wire] = []

    def launch(self, rank: int, address: str, token: str, follower: str) -> None:
        if rank == 1:
            for joined, given in ((1, "wrong"), (0, token), (3, token)):
                self._strangers.append(self._join(joined, address, given))
        threading.Thread(target=self._be, args=(rank, address, token), daemon=True).start()

    def _join(self, rank: int, address: str, token: str) -> Wire:
        wire = Wire.connect(address, _TIMEOUT_S)
        join = ranks_pb2.RankJoin(rank=rank, token=token)
        wire.send(ranks_pb2.RankEvent(join=join).SerializeToString())
        return wire

    def _be(self, rank: int, address: str, token: str) -> None:
        wire = self._join(rank, address, token)
        welcome = ranks_pb2.RankCommand.FromString(wire.receive(_TIMEOUT_S)).welcome
        self.configs[rank] = WorkerConfig.from_json(welcome.worker_json)
        self.wires[rank] = wire
        ready = ranks_pb2.RankReady(link_address=f"address {rank}")
        wire.send(ranks_pb2.RankEvent(ready=ready).SerializeToString())

    def step(self, rank: int, *, done: bool) -> None:
        step = ranks_pb2.RankStep(step=1, done=done)
        self.wires[rank].send(ranks_pb2.RankEvent(step=step).SerializeToString())

    def close(self) -> None:
        for wire in (*self.wires.values(), *self._strangers):
            wire.close()

    kill = close


@pytest.fixture
def followers() -> Followers:
    return Followers()


@pytest.fixture
def lost() -> "queue.Queue[str]":
    return queue.Queue()


@pytest.fixture
def ranks(followers: Followers, lost: "queue.Queue[str]") -> Iterator[Ranks]:
    ranks = Ranks(_CONFIG, worker_pb2.ROLE_DECODER, 1, followers, lost.put)
    assert ranks.wait_ready() == ["address 1", "address 2"]
    yield ranks
    ranks.close()


def _send_step(ranks: Ranks) -> None:
    ranks.send_steps([(ranks.others, ranks_pb2.RankCommand(forward=ranks_pb2.Forward()))])


@pytest.mark.usefixtures("ranks")
def test_followers_are_told_who_they_are_and_strangers_are_not(followers: Followers) -> None:
    assert {r: c.parallel.rank for r, c in followers.configs.items()} == {1: 1, 2: 2}


def test_the_rank_that_has_not_begun_a_step_is_named(
    followers: Followers, ranks: Ranks, lost: "queue.Queue[str]"
) -> None:
    _send_step(ranks)
    followers.step(1, done=False)  # it waits for rank 2 in a collective
    assert lost.get(timeout=_TIMEOUT_S).startswith("rank 2 is late: step 1 has not ended")


def test_all_ranks_that_began_and_did_not_end_are_named(
    followers: Followers, ranks: Ranks, lost: "queue.Queue[str]"
) -> None:
    _send_step(ranks)
    followers.step(1, done=False)
    followers.step(2, done=False)
    assert lost.get(timeout=_TIMEOUT_S).startswith("rank 1, 2 is late")


def test_ranks_that_have_nothing_to_do_are_not_late(
    followers: Followers, ranks: Ranks, lost: "queue.Queue[str]"
) -> None:
    _send_step(ranks)
    followers.step(1, done=True)
    followers.step(2, done=True)
    with pytest.raises(queue.Empty):
        lost.get(timeout=3 * _CONFIG.rank_timeout_s)


def test_a_rank_that_ends_is_lost_at_once(
    followers: Followers, ranks: Ranks, lost: "queue.Queue[str]"
) -> None:
    _send_step(ranks)
    followers.wires[2].close()
    assert lost.get(timeout=_TIMEOUT_S).startswith("rank 2 is gone")


class FailingFollowers(Followers):
    """One of them cannot load, and the others never end loading."""

    def __init__(self, failing: int) -> None:
        super().__init__()
        self._failing = failing

    def _be(self, rank: int, address: str, token: str) -> None:
        wire = self._join(rank, address, token)
        wire.receive(_TIMEOUT_S)
        if rank == self._failing:
            failed = ranks_pb2.RankFailed(error="no such file")
            wire.send(ranks_pb2.RankEvent(failed=failed).SerializeToString())
        self.wires[rank] = wire


@pytest.mark.parametrize("failing", [1, 2])  # one of them joins last
def test_a_rank_that_cannot_load_says_why(failing: int, lost: "queue.Queue[str]") -> None:
    followers = FailingFollowers(failing)
    ranks = Ranks(_CONFIG, worker_pb2.ROLE_DECODER, 1, followers, lost.put)
    try:
        with pytest.raises(RuntimeError, match=f"rank {failing}: no such file"):
            ranks.wait_ready()
    finally:
        ranks.close()
