"""Steps ahead on a stream: nothing makes the host wait before the next step is launched."""

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tests.npu.simulator  # noqa: F401  (gives the NPU's operators CPU kernels)
from engine.colocated import ColocatedEngine
from engine.scheduler import SchedulerConfig
from kernels.ascend.queue import StreamQueue, mark
from kernels.npu import NpuOps
from tests.npu.drawn import PLAIN, requests
from tests.npu.fake_npu import FakeNpu
from tests.npu.families import BLOCK_SIZE, family
from tests.npu.graph_decode import FewAclSizes, decode
from tests.npu.tokens import npu_ops

READS = {"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__index__"}


class Stream:
    """Stands in for torch.npu: writes down when events are recorded and waited for."""

    def __init__(self) -> None:
        self.record: list[str] = []
        self.num_done = 0
        """Launches that the device is through with, for those who only look."""

    def Event(self) -> Any:
        number = sum(entry.startswith("launch") for entry in self.record)
        stream = self

        class Event:
            def record(self) -> None:
                stream.record.append(f"launch {number}")

            def synchronize(self) -> None:
                stream.record.append(f"wait {number}")

            def query(self) -> bool:
                stream.record.append(f"look {number}")
                return number < stream.num_done

        return Event()


class Queue(StreamQueue):
    """Knows which memory is the host's own."""

    def __init__(self, stream: Stream, device: torch.device) -> None:
        super().__init__(stream, device, pins=False)
        self.stream = stream
        self.host: set[int] = set()

    def host_ints(self, size: int) -> Tensor:
        made = super().host_ints(size)
        self.host.add(made.untyped_storage().data_ptr())
        return made


class StreamOps(NpuOps):
    """Ops whose queue is the stream."""

    made: Queue

    def queue(self) -> Queue:
        self.made = Queue(Stream(), self.device)
        return self.made


class ReadsOfTheDevice(TorchFunctionMode):
    """What would make the host wait: a look at values that a step computes."""

    def __init__(self, host: set[int]) -> None:
        super().__init__()
        self.found: list[str] = []
        self._host = host

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in READS and args[0].untyped_storage().data_ptr() not in self._host:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def stream_ops() -> StreamOps:
    return StreamOps(device=torch.device("cpu"), dtype=torch.float32, options=npu_ops().options)


def make_engine(*, is_async: bool) -> tuple[ColocatedEngine, StreamOps]:
    ops = stream_ops()
    engine = ColocatedEngine(
        family("qwen3", ops),
        ops,
        num_blocks=2 * len(PLAIN),
        block_size=BLOCK_SIZE,
        scheduler_config=SchedulerConfig(max_num_seqs=len(PLAIN), max_model_len=256),
        async_scheduling=is_async,
    )
    return engine, ops


def test_the_next_step_is_launched_before_the_host_waits_for_one() -> None:
    in_turn, _ = make_engine(is_async=False)
    expected = requests(PLAIN)
    in_turn.generate(expected)
    engine, ops = make_engine(is_async=True)
    made = requests(PLAIN)
    engine.generate(made)
    assert [r.token_ids for r in made] == [r.token_ids for r in expected]
    steps = range(12)
    wanted = ["launch 0"]
    for i in steps:
        wanted += [f"launch {i + 1}", f"wait {i}"] if i + 1 in steps else [f"wait {i}"]
    assert ops.made.stream.record == wanted


def test_a_mark_is_set_at_once_and_waited_for_when_it_is_asked_for() -> None:
    stream = Stream()
    wait = mark(stream)
    assert stream.record == ["launch 0"]
    mark(stream)
    stream.num_done = 1
    assert wait(lambda: inf)
    assert stream.record == ["launch 0", "launch 1", "look 0"]


def test_a_mark_that_is_not_reached_is_waited_for_until_a_deadline_that_comes_closer() -> None:
    stream = Stream()
    wait = mark(stream)
    deadlines = iter([inf, inf, 0.0])
    assert not wait(lambda: next(deadlines))
    assert stream.record == ["launch 0", *["look 0"] * 3]


def test_a_launch_reads_nothing_of_what_a_step_computes() -> None:
    engine, ops = make_engine(is_async=True)
    assert engine.ahead is not None
    made = requests(PLAIN)
    for request in made:
        engine.scheduler.add(request)
    engine.step()  # what is made for a batch of new requests is made by now
    scheduled = engine.scheduler.schedule_ahead()
    assert scheduled
    with ReadsOfTheDevice(ops.made.host) as reads:
        engine.ahead.launch(scheduled)
        assert reads.found == []
        engine.ahead.conclude()
        assert reads.found == ["tolist"]
    engine.ahead.conclude()
    engine.close()
    assert all(request.num_output_tokens == 2 for request in made)


def test_captured_graphs_are_replayed_ahead_too() -> None:
    ops = stream_ops()
    model = family("qwen3", ops)
    expected, _ = decode(model, ops, None)
    backend = FewAclSizes(ops, npu=FakeNpu())
    tokens, graphs = decode(model, ops, backend, async_scheduling=True)
    assert tokens == expected
    assert graphs.stats.num_replays > 0


def test_requests_that_the_host_draws_take_steps_in_turn() -> None:
    options = [*PLAIN[:2], {"logit_bias": {5: 3.0}, "max_tokens": 5}]
    tokens = []
    for is_async in (False, True):
        engine, _ = make_engine(is_async=is_async)
        made = requests(options)
        engine.generate(made)
        tokens.append([request.token_ids for request in made])
    assert tokens[0] == tokens[1]
    assert engine.ahead is not None
    assert set(engine.ahead.stats.waits) == {"drawn on the host"}
    assert engine.ahead.stats.num_ahead > 0
