"""Whatever happens in whatever order, each request gets the tokens it would get alone."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.request import RequestState
from tests.engine.scheduler_machine import EngineMachine
from tests.engine.scheduling import expected_tokens, make_request, make_scheduler, step

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
