"""What ranks agree on before a step, from the rows of all of them."""

from dataclasses import replace

import pytest

from engine.parallel_config import ParallelConfig
from engine.step_plan import StepPlan, plan_step

_CONFIG = ParallelConfig(tp_size=2, dp_size=2, ep_size=4)
_PAIR = ParallelConfig(dp_size=2, ep_size=2)


@pytest.mark.parametrize(
    ("config", "num_rows", "num_experts_per_tok", "gathers"),
    [
        (_PAIR, [16, 16], 8, True),  # four of eight copies go to the other rank, or one row
        (_PAIR, [16, 12], 8, False),  # less, with padding
        (_PAIR, [16, 16], 6, False),
        (_CONFIG, [16, 16], 8, False),  # six copies, or three rows
        (_CONFIG, [1, 4096], 8, False),
    ],
)
def test_rows_are_gathered_where_that_moves_a_quarter_of_them(
    config: ParallelConfig, num_rows: list[int], num_experts_per_tok: int, gathers: bool
) -> None:
    plan = plan_step(num_rows, config, num_experts_per_tok)
    assert (plan.bucket, plan.gathers) == (max(num_rows), gathers)
    assert plan.is_even == (len(set(num_rows)) == 1)


def test_the_plan_follows_the_configuration_and_spares_dense_models() -> None:
    rows = [16, 16]
    assert plan_step(rows, replace(_CONFIG, moe_exchange="gather"), 2).gathers
    assert not plan_step(rows, replace(_PAIR, moe_exchange="all_to_all"), 8).gathers
    assert not plan_step(rows, _PAIR, 0).gathers
    assert not plan_step(rows, _PAIR, 8, has_operators=True).gathers
    assert not plan_step(rows, ParallelConfig(dp_size=2), 8).gathers


def test_the_bucket_of_a_rank_holds_its_share_of_the_largest_batch() -> None:
    assert plan_step([5, 2], _CONFIG, 2).own_bucket(2) == 3
    assert StepPlan().own_bucket(2) == 0
