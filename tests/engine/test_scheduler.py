"""Scheduling: order, budgets, preemption; and each request gets the tokens it would get alone."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_manager import BlockManager
from engine.request import FinishReason, Request, RequestState, SamplingParams
from engine.scheduler import QueueFull, ScheduledRequest, Scheduler, SchedulerConfig

EOS = 99


def make_request(
    name: str, num_prompt_tokens: int = 5, priority: int = 0, max_tokens: int = 4, **sampling
) -> Request:
    prompt = [sum(name.encode()) % 50 + i for i in range(num_prompt_tokens)]
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Request(name, 0, prompt, num_prompt_tokens, params, priority=priority)


def make_scheduler(num_blocks: int = 32, block_size: int = 4, **options) -> Scheduler:
    settings_ = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    hold_finished = options.pop("hold_finished", False)
    config = SchedulerConfig(**(settings_ | options))
    return Scheduler(
        config,
        BlockManager(num_blocks, block_size),
        eos_token_ids=frozenset({EOS}),
        hold_finished=hold_finished,
    )


def next_token(token_ids: Sequence[int]) -> int:
    """A model: the next token depends on all before it."""
    return hash(tuple(token_ids)) % 90


def step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """One step with the fake model; (request, tokens) as scheduled."""
    scheduled = scheduler.schedule().scheduled
    shown = [(entry.request.request_id, entry.num_tokens) for entry in scheduled]
    tokens = [next_token(entry.request.token_ids) for entry in scheduled if entry.samples]
    scheduler.update(scheduled, tokens)
    return shown


def run_to_end(scheduler: Scheduler, max_steps: int = 2000) -> int:
    for count in range(max_steps):
        if not scheduler.has_work:
            return count
        step(scheduler)
    raise AssertionError(f"still {scheduler.num_running} running, {scheduler.num_waiting} waiting")


def expected_tokens(prompt: Sequence[int], max_tokens: int, max_model_len: int = 64) -> list[int]:
    token_ids = list(prompt)
    while len(token_ids) < min(len(prompt) + max_tokens, max_model_len):
        token_ids.append(next_token(token_ids))
    return token_ids


def test_one_request_prefills_in_chunks_and_then_decodes():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = make_request("a", 10, max_tokens=3)
    scheduler.add(request)
    assert [step(scheduler) for _ in range(5)] == [
        [("a", 4)],
        [("a", 4)],
        [("a", 2)],
        [("a", 1)],
        [("a", 1)],
    ]
    assert request.state is RequestState.FINISHED
    assert request.finish_reason is FinishReason.LENGTH
    assert not scheduler.has_work
    assert scheduler.block_manager.num_held_blocks == 0


def test_decode_goes_before_prefill_and_the_rest_of_the_budget_is_used():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add(make_request("a", 3, max_tokens=9))
    step(scheduler)
    scheduler.add(make_request("b", 20))
    assert step(scheduler) == [("a", 1), ("b", 7)]
    assert step(scheduler) == [("a", 1), ("b", 7)]
    scheduler.add(make_request("c", 4))
    assert step(scheduler) == [("a", 1), ("b", 6), ("c", 1)]


def test_max_prefill_tokens_bounds_prefill_but_not_decode():
    scheduler = make_scheduler(max_prefill_tokens=2)
    scheduler.add(make_request("a", 2, max_tokens=9))
    step(scheduler)
    scheduler.add(make_request("b", 5))
    assert step(scheduler) == [("a", 1), ("b", 2)]
    assert step(scheduler) == [("a", 1), ("b", 2)]
    assert step(scheduler) == [("a", 1), ("b", 1)]
    assert step(scheduler) == [("a", 1), ("b", 1)]


def test_no_more_than_max_num_seqs_run():
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 3))
    assert [name for name, _ in step(scheduler)] == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)


def test_lower_priority_numbers_are_served_first_and_equal_ones_in_order():
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        scheduler.add(make_request(name, 3, priority, max_tokens=1))
    assert [step(scheduler)[0][0] for _ in range(4)] == ["b", "d", "a", "c"]


def test_a_prefix_hit_is_not_computed_again():
    scheduler = make_scheduler(max_num_batched_tokens=64)
    first, second = make_request("a", 17, max_tokens=1), make_request("a", 17, max_tokens=1)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    assert step(scheduler) == [("a", 1)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert first.token_ids == second.token_ids


def test_a_full_pool_preempts_the_request_seated_last_and_recomputes_it():
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=32)
    first, second = make_request("a", 8, max_tokens=12), make_request("b", 8, max_tokens=12)
    for request in (first, second):
        scheduler.add(request)
    run_to_end(scheduler)
    assert scheduler.num_preemptions > 0
    for request in (first, second):
        assert request.token_ids == expected_tokens(request.token_ids[:8], 12)
        assert request.num_cached_tokens == 0
    assert scheduler.block_manager.num_held_blocks == 0


def test_a_preempted_request_goes_before_new_ones():
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=32)
    for name in "ab":
        scheduler.add(make_request(name, 8, max_tokens=12))
    victims: list[Request] = []
    while not victims:
        output = scheduler.schedule()
        victims = output.preempted
        scheduler.update(output.scheduled, [1 for entry in output.scheduled if entry.samples])
    assert [victim.request_id for victim in victims] == ["b"]
    assert victims[0].state is RequestState.WAITING
    assert victims[0].num_computed_tokens == 0
    assert scheduler.has_preempted
    # It would fit, but must not overtake.
    scheduler.add(make_request("c", 4))
    shown = []
    while victims[0].state is not RequestState.RUNNING:
        assert scheduler.has_preempted
        shown.append([name for name, _ in step(scheduler)])
    assert not scheduler.has_preempted
    shown += [[name for name, _ in step(scheduler)] for _ in range(20)]
    first_with = {name: next(i for i, n in enumerate(shown) if name in n) for name in "bc"}
    assert 0 < first_with["b"] <= first_with["c"]


def test_the_lowest_priority_is_preempted_even_if_it_was_seated_first():
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=32)
    low = make_request("a", 8, priority=5, max_tokens=12)
    scheduler.add(low)
    step(scheduler)
    scheduler.add(make_request("b", 8, priority=0, max_tokens=12))
    while not scheduler.has_preempted:
        step(scheduler)
    assert low.state is RequestState.WAITING
    run_to_end(scheduler)


def test_an_eos_or_stop_token_ends_the_request_with_stop():
    for token, params in ((EOS, {}), (7, {"stop_token_ids": frozenset({7})})):
        scheduler = make_scheduler()
        request = make_request("a", **params)
        scheduler.add(request)
        scheduler.update(scheduler.schedule().scheduled, [token])
        assert request.finish_reason is FinishReason.STOP
        assert request.token_ids[-1] == token


def test_ignore_eos_and_min_tokens_keep_the_request_going():
    for params in ({"ignore_eos": True}, {"min_tokens": 1}):
        scheduler = make_scheduler()
        request = make_request("a", **params)
        scheduler.add(request)
        scheduler.update(scheduler.schedule().scheduled, [EOS])
        assert request.state is RequestState.RUNNING


def test_min_tokens_and_max_tokens_count_output_from_before_a_migration():
    scheduler = make_scheduler()
    request = make_request("a", 5, max_tokens=4, min_tokens=2)
    request.token_ids += [1, 2]
    scheduler.add(request)
    scheduler.update(scheduler.schedule().scheduled, [EOS])
    assert request.finish_reason is FinishReason.STOP
    other = make_request("b", 5, max_tokens=4)
    other.token_ids += [1, 2]
    scheduler.add(other)
    run_to_end(scheduler)
    assert other.num_output_tokens == 4


def test_max_model_len_ends_the_request_with_length():
    scheduler = make_scheduler(max_model_len=8)
    request = make_request("a", 5, max_tokens=100)
    scheduler.add(request)
    run_to_end(scheduler)
    assert request.num_tokens == 8
    assert request.finish_reason is FinishReason.LENGTH


def test_a_prefiller_samples_one_token_and_keeps_the_blocks():
    scheduler = make_scheduler(prefill_only=True)
    request, ended = make_request("a", 9, max_tokens=4), make_request("b", 5, max_tokens=1)
    for each in (request, ended):
        scheduler.add(each)
    run_to_end(scheduler)
    assert request.state is RequestState.SENDING
    assert (request.finish_reason, ended.finish_reason) == (None, FinishReason.LENGTH)
    assert (request.num_tokens, request.num_computed_tokens) == (10, 9)
    assert scheduler.get(request.key) is None
    assert len(request.block_ids) == 3
    for each in (request, ended):
        scheduler.block_manager.free(each)
    assert scheduler.block_manager.num_held_blocks == 0


def test_hold_finished_leaves_the_blocks_to_the_caller():
    scheduler = make_scheduler(hold_finished=True)
    request = make_request("a")
    scheduler.add(request)
    run_to_end(scheduler)
    assert request.state is RequestState.FINISHED
    assert request.block_ids
    scheduler.remove(request)
    assert request.state is RequestState.FINISHED
    assert scheduler.block_manager.num_held_blocks == 0


def test_a_full_queue_refuses_and_names_its_bound():
    scheduler = make_scheduler(max_num_waiting=2)
    for name in "ab":
        scheduler.add(make_request(name))
    with pytest.raises(QueueFull, match="the bound is 2"):
        scheduler.add(make_request("c"))
    assert scheduler.num_waiting == 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("a", 64), "64 tokens, max_model_len is 64"),
        (make_request("a", 30, max_tokens=12), "KV of 41 tokens, the pool has 40"),
        (make_request("a", 5, max_tokens=0), "max_tokens is 0"),
        (make_request("a", 0), "0 tokens"),
    ],
)
def test_a_request_that_can_never_run_is_refused(request_, message):
    scheduler = make_scheduler(num_blocks=10)
    with pytest.raises(ValueError, match=message):
        scheduler.add(request_)
    assert not scheduler.has_work


def test_the_largest_request_that_fits_the_pool_runs_alone_to_its_end():
    scheduler = make_scheduler(num_blocks=10)
    request = make_request("a", 30, max_tokens=11)
    scheduler.add(request)
    run_to_end(scheduler)
    assert request.num_tokens == 41


def test_a_known_key_is_refused():
    scheduler = make_scheduler()
    scheduler.add(make_request("a"))
    with pytest.raises(ValueError, match="request a attempt 0 is known"):
        scheduler.add(make_request("a"))


def test_more_seats_than_tokens_in_a_step_are_refused():
    with pytest.raises(ValueError, match="max_num_seqs is 8, more than max_num_batched_tokens 4"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4)


def test_a_request_whose_kv_arrived_decodes_in_the_next_step():
    scheduler = make_scheduler()
    request = arrived(scheduler, "a", 9)
    scheduler.add_running(request)
    assert request.state is RequestState.RUNNING
    assert step(scheduler) == [("a", 1)]


def test_a_request_whose_kv_arrived_waits_for_a_seat_and_goes_before_others():
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", 3, max_tokens=2))
    step(scheduler)
    scheduler.add(make_request("b", 3))
    scheduler.add_running(arrived(scheduler, "c", 9))
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    assert step(scheduler) == [("a", 1)]
    assert step(scheduler) == [("c", 1)]


def test_a_reservation_is_not_blocked_by_a_large_request_before_it():
    scheduler = make_scheduler(num_blocks=6)
    reserved = make_request("r", 12, max_tokens=2)
    assert scheduler.block_manager.allocate(reserved, reserved.num_tokens)
    scheduler.add(make_request("big", 20, max_tokens=2))
    scheduler.add(reserved)
    assert step(scheduler) == [("r", 12)]
    run_to_end(scheduler)
    assert scheduler.block_manager.num_held_blocks == 0


def test_a_removed_request_leaves_every_queue_and_frees_its_blocks():
    scheduler = make_scheduler(max_num_seqs=2)
    running, waiting = make_request("a", 9), make_request("b", 3)
    scheduler.add(running)
    step(scheduler)
    scheduler.add(make_request("x", 3))
    scheduler.add(waiting)
    kept = arrived(scheduler, "c", 9)
    step(scheduler)
    scheduler.add_running(kept)
    for request in (running, waiting, kept):
        scheduler.remove(request)
        scheduler.remove(request)
        assert request.state is RequestState.ABORTED
        assert scheduler.get(request.key) is None
    run_to_end(scheduler)
    assert scheduler.block_manager.num_held_blocks == 0


def test_a_request_removed_during_its_step_does_not_shift_the_others_tokens():
    scheduler = make_scheduler()
    first, second = make_request("a", 3), make_request("b", 3)
    for request in (first, second):
        scheduler.add(request)
    scheduled = scheduler.schedule().scheduled
    scheduler.remove(first)
    scheduler.update(scheduled, [11, 22])
    assert first.num_tokens == 3
    assert second.token_ids[-1] == 22


def test_pending_tokens_are_those_of_requests_that_do_not_decode():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_request("a", 4))
    step(scheduler)
    assert scheduler.num_pending_tokens == 0
    scheduler.add(make_request("b", 10))
    scheduler.add(make_request("c", 6))
    assert scheduler.num_pending_tokens == 16
    step(scheduler)
    assert scheduler.num_pending_tokens == 13


def arrived(scheduler: Scheduler, name: str, num_prompt_tokens: int) -> Request:
    """A request as a decoder has it once all of its prompt's KV came in, with the first token."""
    request = make_request(name, num_prompt_tokens)
    scheduler.block_manager.attach_prefix(request)
    assert scheduler.block_manager.allocate(request, num_prompt_tokens)
    request.num_computed_tokens = num_prompt_tokens
    scheduler.block_manager.register_computed(request)
    request.token_ids.append(next_token(request.token_ids))
    return request


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


EngineMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEngineMachine = EngineMachine.TestCase


@settings(deadline=None, max_examples=80)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=10),
    num_blocks=st.integers(7, 12),
    block_size=st.integers(3, 4),
    budget=st.integers(4, 20),
    prefill_only=st.booleans(),
)
def test_all_requests_end_in_any_pool_that_holds_one(
    sizes, num_blocks, block_size, budget, prefill_only
):
    scheduler = make_scheduler(
        num_blocks, block_size, max_num_batched_tokens=budget, prefill_only=prefill_only
    )
    requests = []
    for index, (num_prompt_tokens, max_tokens) in enumerate(sizes):
        requests.append(make_request(str(index), num_prompt_tokens, max_tokens=max_tokens))
        scheduler.add(requests[-1])
    for _ in range(1000):
        if not scheduler.has_work:
            break
        step(scheduler)
        for request in requests:
            if request.state is RequestState.SENDING:
                scheduler.block_manager.free(request)
    assert not scheduler.has_work
    for request, (num_prompt_tokens, max_tokens) in zip(requests, sizes, strict=True):
        num_sampled = 1 if prefill_only else max_tokens
        assert request.token_ids == expected_tokens(
            request.token_ids[:num_prompt_tokens], num_sampled
        )
    assert scheduler.block_manager.num_held_blocks == 0
