"""Which data-parallel rank takes a request."""

from dataclasses import replace

import pytest

from engine.worker.balance import Load, least_loaded

_LOAD = Load(
    num_requests=4,
    max_num_requests=16,
    num_tokens=0,
    max_num_tokens=64,
    num_blocks=10,
    max_num_blocks=100,
)


@pytest.mark.parametrize(
    "other",
    [
        {"num_requests": 3},
        {"num_blocks": 5},  # fewer held, or more of the prompt in its prefix cache
        {"num_requests": 6, "num_blocks": 10 - 20},  # a seat is worth so many blocks
    ],
)
def test_seats_and_blocks_decide(other: dict[str, int]) -> None:
    assert least_loaded([_LOAD, replace(_LOAD, **other)]) == 1


def test_a_prompt_that_waits_to_be_computed_outweighs_a_few_streams() -> None:
    busy = replace(_LOAD, num_tokens=128)
    assert least_loaded([busy, replace(_LOAD, num_requests=12)]) == 1


def test_a_pool_that_would_overflow_comes_last() -> None:
    full = replace(_LOAD, num_requests=1, num_blocks=101)
    assert least_loaded([full, replace(_LOAD, num_requests=16, num_blocks=99)]) == 1


def test_equals_are_taken_in_order() -> None:
    assert least_loaded([_LOAD, _LOAD, _LOAD]) == 0
