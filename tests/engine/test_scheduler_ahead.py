"""The same in any order with steps ahead, on a device that does everything as late as it may."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant

from engine.async_scheduling import AsyncScheduling
from engine.request import Request, RequestState
from engine.scheduler import Scheduler
from engine.scheduler_output import ScheduledRequest
from tests.engine.scheduler_machine import EngineMachine
from tests.engine.scheduling import next_token

ENDS = frozenset(range(0, 90, 6))
Slot = tuple[int, int]


@dataclass
class Launched:
    """What the device was given: it looks at no request any more."""

    entry: ScheduledRequest
    known: list[int]
    slots: list[Slot]


@dataclass
class LateDevice:
    """Computes a step when its result is asked for, with the blocks that it had at its launch."""

    machine: "AheadMachine"
    steps: deque[list[Launched]] = field(default_factory=deque)
    drawn: dict[int, int] = field(default_factory=dict)
    stats: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(waits=Counter()))

    @property
    def num_under_way(self) -> int:
        return len(self.steps)

    def why_wait(self) -> str:
        # Some requests need the host: by their names, so that it comes and goes.
        live = [r for r in self.machine.live if r.state is RequestState.RUNNING]
        return "because" if any(int(r.request_id) % 5 == 0 for r in live) else ""

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> None:
        size = self.machine.block_size
        step = []
        for entry in scheduled:
            request = entry.request
            assert entry.num_unknown <= 1
            assert len(request.block_ids) * size >= entry.stop
            places = [(request.block_ids[p // size], p % size) for p in range(entry.stop)]
            step.append(Launched(entry, list(request.token_ids), places))
        self.machine.scheduler.begin(scheduled)
        self.steps.append(step)

    def conclude(self) -> list[Request]:
        step = self.steps.popleft()
        slots = self.machine.cache.slots
        histories = []
        for launched in step:
            entry, tokens = launched.entry, launched.known
            if entry.num_unknown:
                tokens = [*tokens, self.drawn[id(entry.request)]]
            for position in range(entry.start, entry.stop):
                slots[launched.slots[position]] = tuple(tokens[: position + 1])
            histories.append(tokens[: entry.stop])
        for launched, tokens in zip(step, histories, strict=True):
            if self.machine.scheduler.get(launched.entry.request.key) is not None:
                for position, slot in enumerate(launched.slots):
                    assert slots[slot] == tuple(tokens[: position + 1])
        sampling = [(i, x.entry.request) for i, x in enumerate(step) if x.entry.samples]
        tokens_drawn = [next_token(histories[i]) for i, _ in sampling]
        self.drawn = {id(r): t for (_, r), t in zip(sampling, tokens_drawn, strict=True)}
        self.machine.scheduler.conclude([x.entry for x in step], tokens_drawn)
        return []

    def run_one(self, scheduled: Sequence[ScheduledRequest]) -> list[Request]:
        self.launch(scheduled)
        return self.conclude()


class AheadMachine(EngineMachine):
    """Requests end by tokens too, which a step ahead of them does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(self.config, self.blocks, eos_token_ids=ENDS)
        self.device = LateDevice(self)
        self.async_scheduling = AsyncScheduling(
            self.device,  # type: ignore[arg-type]
            self.device,
            lambda: self.scheduler.schedule().scheduled,
            self.scheduler.schedule_ahead,
        )

    def _step(self) -> None:
        self.async_scheduling.step()
        assert self.device.num_under_way <= 1
        for request in [r for r in self.live if r.state is RequestState.FINISHED]:
            self.live.remove(request)
            self._check_ended(request)

    def _check_ended(self, request: Request) -> None:
        tokens = request.token_ids
        first = request.num_prompt_tokens
        assert tokens[first:] == [next_token(tokens[:i]) for i in range(first, len(tokens))]
        # The first one of those that arrived was drawn elsewhere.
        assert not ENDS & set(tokens[first + 1 : -1])
        is_full = len(tokens) in (first + request.sampling.max_tokens, self.max_model_len)
        assert is_full or tokens[-1] in ENDS
        assert request.block_ids == []

    @invariant()
    def no_block_is_lost_or_shared_wrongly(self) -> None:
        self.blocks.check_integrity([*self.live, *self.outside])
        num_elsewhere = sum(map(len, self.quarantined))
        assert self.blocks.num_quarantined_blocks >= num_elsewhere
        if not self.device.num_under_way:
            assert self.blocks.num_quarantined_blocks == num_elsewhere
        for request in [*self.live, *self.outside]:
            self.cache.check(request, request.num_computed_tokens)

    def teardown(self) -> None:
        for request in self.outside:
            self.quarantined.append(self.blocks.quarantine(request))
        self.outside = []
        while self.quarantined:
            self.acknowledge()
        for _ in range(600):
            if self.scheduler.has_work or self.device.num_under_way:
                self._step()
        super().teardown()


AheadMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
TestAheadMachine = AheadMachine.TestCase
