"""Preemption: who has to go, when it comes back, and that its output is as if it had stayed."""

from engine.request import Request, RequestState
from tests.engine.scheduling import expected_tokens, make_request, make_scheduler, run_to_end, step


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


def test_a_step_that_preempts_admits_nobody():
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=32)
    scheduler.add(make_request("a", 8, max_tokens=12))
    scheduler.add(make_request("b", 8, priority=5, max_tokens=12))
    step(scheduler)
    # It waits for a seat; the blocks that the victim leaves would do for it.
    scheduler.add(make_request("c", 4))
    shown = []
    while not scheduler.has_preempted:
        shown = step(scheduler)
    assert shown == [("a", 1)]
    assert step(scheduler) == [("a", 1), ("c", 4)]
