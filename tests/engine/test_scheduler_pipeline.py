"""Steps of a pipeline begin before those ahead of them have ended."""

from engine.request import RequestState
from engine.scheduler import Scheduler
from engine.scheduler_output import ScheduledRequest
from tests.engine.scheduling import make_request, make_scheduler


def _launch(scheduler: Scheduler) -> list[ScheduledRequest]:
    scheduled = scheduler.schedule().scheduled
    scheduler.launch(scheduled)
    return scheduled


def _shown(scheduled: list[ScheduledRequest]) -> list[tuple[str, int]]:
    return [(entry.request.request_id, entry.num_tokens) for entry in scheduled]


def test_chunks_follow_each_other_and_a_request_that_samples_rests_until_its_token() -> None:
    scheduler = make_scheduler(prefill_only=True, max_num_batched_tokens=8)
    first, second = make_request("first", 18), make_request("second", 9)
    scheduler.add(first)
    scheduler.add(second)
    steps = [_launch(scheduler) for _ in range(5)]
    assert [_shown(step) for step in steps] == [
        [("first", 8)],
        [("first", 8)],
        [("first", 2), ("second", 6)],
        [("second", 3)],
        [],
    ]
    assert [entry.samples for entry in steps[2]] == [True, False]
    scheduler.update(steps[2][:1], [7])
    assert first.token_ids[-1] == 7
    assert first.state is RequestState.SENDING
    assert first.num_computed_tokens == 18


def test_what_a_step_under_way_computes_is_a_prefix_for_the_next_one() -> None:
    scheduler = make_scheduler(prefill_only=True, max_num_batched_tokens=8)
    scheduler.add(make_request("a", 12))
    _launch(scheduler)
    twin = make_request("a", 12)
    twin.attempt = 1
    scheduler.add(twin)
    assert _shown(_launch(scheduler)) == [("a", 4), ("a", 4)]
    assert twin.num_cached_tokens == 8


def test_a_request_that_was_removed_gets_no_token_and_gives_its_blocks_back() -> None:
    scheduler = make_scheduler(prefill_only=True)
    request = make_request("gone", 6)
    scheduler.add(request)
    step = _launch(scheduler)
    scheduler.remove(request)
    scheduler.update(step, [7])
    assert request.token_ids[-1] != 7
    assert scheduler.block_manager.num_held_blocks == 0
    assert _launch(scheduler) == []
