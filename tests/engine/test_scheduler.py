"""Scheduling of requests: order, budgets, ends, refusals."""

import pytest

from engine.request import FinishReason, RequestState
from engine.scheduler import QueueFull, SchedulerConfig
from tests.engine.scheduling import (
    EOS,
    arrived,
    make_request,
    make_scheduler,
    run_to_end,
    step,
)


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
