"""A scheduler to which anything may happen in any order."""

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_manager import BlockManager
from engine.request import Request, RequestState, SamplingParams
from engine.scheduler import QueueFull, Scheduler, SchedulerConfig
from engine.scheduler_output import ScheduledRequest
from tests.engine.scheduling import expected_tokens, next_token


class FakeCache:
    """What each slot of the pool holds, written and read as a model would."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        return request.block_ids[position // self.block_size], position % self.block_size

    def write(self, request: Request, start: int, stop: int) -> None:
        for position in range(start, stop):
            history = tuple(request.token_ids[: position + 1])
            self.slots[self._slot(request, position)] = history

    def check(self, request: Request, stop: int) -> None:
        for position in range(stop):
            held = self.slots[self._slot(request, position)]
            assert held == tuple(request.token_ids[: position + 1])

    def run(self, scheduled: Sequence[ScheduledRequest]) -> list[int]:
        for entry in scheduled:
            start = entry.request.num_computed_tokens
            self.write(entry.request, start, start + entry.num_tokens)
        for entry in scheduled:
            self.check(entry.request, entry.request.num_computed_tokens + entry.num_tokens)
        return [next_token(entry.request.token_ids) for entry in scheduled if entry.samples]


SIZES = {
    "num_prompt_tokens": st.integers(1, 15),
    "max_tokens": st.integers(1, 9),
    "priority": st.integers(0, 2),
}


class EngineMachine(RuleBasedStateMachine):
    """Adds, reservations, arrivals, aborts, quarantine and steps in any order over a tiny pool."""

    num_blocks, block_size = 9, 3
    max_model_len = 24

    def __init__(self) -> None:
        super().__init__()
        self.config = SchedulerConfig(
            max_num_seqs=3,
            max_num_batched_tokens=7,
            max_prefill_tokens=5,
            max_num_waiting=6,
            max_model_len=self.max_model_len,
        )
        self.blocks = BlockManager(self.num_blocks, self.block_size)
        self.scheduler = Scheduler(self.config, self.blocks)
        self.cache = FakeCache(self.block_size)
        self.live: list[Request] = []
        self.outside: list[Request] = []
        self.quarantined: list[list[int]] = []
        self.ended: list[Request] = []
        self.count = 0

    def _request(self, num_prompt_tokens: int, max_tokens: int, priority: int) -> Request:
        self.count += 1
        prompt = [7] * (num_prompt_tokens - 1) + [self.count % 2]
        params = SamplingParams(max_tokens=max_tokens)
        return Request(str(self.count), 0, prompt, num_prompt_tokens, params, priority=priority)

    @rule(**SIZES)
    def add(self, num_prompt_tokens: int, max_tokens: int, priority: int) -> None:
        request = self._request(num_prompt_tokens, max_tokens, priority)
        if self.scheduler.num_waiting >= self.config.max_num_waiting:
            with pytest.raises(QueueFull):
                self.scheduler.add(request)
        else:
            self.scheduler.add(request)
            self.live.append(request)

    @rule(**SIZES)
    def reserve(self, num_prompt_tokens: int, max_tokens: int, priority: int) -> None:
        request = self._request(num_prompt_tokens, max_tokens, priority)
        if self.blocks.fits(request, request.num_tokens):
            self.blocks.attach_prefix(request)
            assert self.blocks.allocate(request, request.num_tokens)
            self.outside.append(request)

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.outside))
        self.outside.remove(request)
        self.cache.write(request, request.num_computed_tokens, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        self.blocks.register_computed(request)
        request.token_ids.append(next_token(request.token_ids))
        if request.num_output_tokens >= request.sampling.max_tokens:
            self.blocks.free(request)
        else:
            self.scheduler.add_running(request)
            self.live.append(request)

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def prefill_locally(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.outside))
        if self.scheduler.num_waiting < self.config.max_num_waiting:
            self.outside.remove(request)
            self.scheduler.add(request)
            self.live.append(request)

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def lose_the_writer(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.outside))
        self.outside.remove(request)
        self.quarantined.append(self.blocks.quarantine(request))

    @precondition(lambda self: self.quarantined)
    @rule()
    def acknowledge(self) -> None:
        self.blocks.release_quarantined(self.quarantined.pop(0))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        self.live.remove(request)
        self.scheduler.remove(request)
        assert request.block_ids == []

    @rule(num_steps=st.integers(1, 4))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        output = self.scheduler.schedule()
        entries = output.scheduled
        assert len({entry.request.key for entry in entries}) == len(entries)
        assert len(entries) <= self.scheduler.num_running <= self.config.max_num_seqs
        assert all(entry.num_tokens > 0 for entry in entries)
        assert sum(entry.num_tokens for entry in entries) <= self.config.max_num_batched_tokens
        prefill = [entry.num_tokens for entry in entries if entry.num_tokens > 1]
        assert sum(prefill) <= (self.config.max_prefill_tokens or 0)
        assert not {r.key for r in output.preempted} & {entry.request.key for entry in entries}
        for entry in entries:
            end = entry.request.num_computed_tokens + entry.num_tokens
            assert len(entry.request.block_ids) * self.block_size >= end
        decoding = [r for r in self.live if r.state is RequestState.RUNNING]
        chosen = {entry.request.key for entry in entries}
        for request in decoding:
            if request.num_tokens - request.num_computed_tokens == 1 and request.num_output_tokens:
                assert request.key in chosen, "a decoding request missed a step"
        self.scheduler.update(entries, self.cache.run(entries))
        for request in [r for r in self.live if r.state is RequestState.FINISHED]:
            self.live.remove(request)
            self._check_ended(request)

    def _check_ended(self, request: Request) -> None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        wanted = expected_tokens(prompt, request.sampling.max_tokens, self.max_model_len)
        assert request.token_ids == wanted
        assert request.block_ids == []
        self.ended.append(request)

    @invariant()
    def no_block_is_lost_or_shared_wrongly(self) -> None:
        self.blocks.check_integrity([*self.live, *self.outside])
        assert self.blocks.num_quarantined_blocks == sum(map(len, self.quarantined))
        for request in [*self.live, *self.outside]:
            self.cache.check(request, request.num_computed_tokens)

    @invariant()
    def every_live_request_is_in_one_place(self) -> None:
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert all(self.scheduler.get(request.key) is request for request in self.live)

    def teardown(self) -> None:
        for request in self.outside:
            self.quarantined.append(self.blocks.quarantine(request))
        self.outside = []
        while self.quarantined:
            self.acknowledge()
        for _ in range(600):
            if not self.scheduler.has_work:
                break
            self._step()
        assert self.live == [], "livelock"
        self.blocks.check_integrity([])
        assert self.blocks.num_held_blocks == 0
