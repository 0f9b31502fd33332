"""What ranks agree on before a step, from the rows of all of them."""

from dataclasses import replace

import pytest

from engine.parallel_config import ParallelConfig
from engine.step_plan import StepPlan, plan_step

_CONFIG = ParallelConfig(tp_size=2, dp_size=2, ep_size=4)


@pytest.mark.parametrize(
    ("num_rows", "gathers"),
    [
        ([1, 1], True),  # one call fewer is worth more than bytes
        ([64, 64], True),
        ([4096, 4096], False),  # of eight experts in 256, few rows are wanted twice
        ([1, 4096], False),
    ],
)
def test_few_rows_are_gathered_and_many_sent_where_they_are_wanted(
    num_rows: list[int], gathers: bool
) -> None:
    assert plan_step(num_rows, _CONFIG, 2) == StepPlan(max(num_rows), gathers)


def test_rows_that_nearly_all_ranks_want_are_gathered_however_many_they_are() -> None:
    assert plan_step([4096, 4096], _CONFIG, 8).gathers
    # But not when most of what is gathered would be padding.
    assert not plan_step([1, 4096], _CONFIG, 4).gathers


def test_the_plan_follows_the_configuration_and_spares_dense_models() -> None:
    many, few = [4096, 4096], [1, 1]
    assert plan_step(many, replace(_CONFIG, moe_exchange="gather"), 2).gathers
    assert not plan_step(few, replace(_CONFIG, moe_exchange="all_to_all"), 2).gathers
    assert not plan_step(few, _CONFIG, 0).gathers
    assert not plan_step(few, _CONFIG, 2, has_operators=True).gathers
    assert not plan_step(few, ParallelConfig(dp_size=2), 2).gathers


def test_the_bucket_of_a_rank_holds_its_share_of_the_largest_batch() -> None:
    assert plan_step([5, 2], _CONFIG, 2).own_bucket(2) == 3
    assert StepPlan().own_bucket(2) == 0
