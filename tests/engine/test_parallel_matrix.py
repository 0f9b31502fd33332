"""A model spread over processes computes what one process computes, whatever the spread: prompts
and decode steps, uneven batches, ranks without work.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.parallel_matrix import (
    DENSE,
    FAMILIES,
    QUICK_DENSE,
    QUICK_SPARSE,
    SPARSE,
    Spread,
    all_spreads,
)
from tests.engine.rank_jobs import ROUNDS, greedy
from tests.engine.ranks import Ranks, alone

pytestmark = pytest.mark.multiprocess

_QUICK_FAMILIES = ("llama", "qwen2, tied", "qwen3-moe", "deepseek-v3")


def _cases() -> list[object]:
    cases = []
    for family in FAMILIES:
        quick = QUICK_DENSE if family in DENSE else QUICK_SPARSE
        for spread in all_spreads(is_sparse=family in SPARSE):
            is_quick = family in _QUICK_FAMILIES and spread in quick
            marks = () if is_quick else pytest.mark.slow
            cases.append(pytest.param(family, spread, id=f"{family}: {spread}", marks=marks))
    return cases


@pytest.fixture(scope="module")
def expected(family_folder: Callable[[str], Path]) -> Callable[[str], list[tuple]]:
    """Of every data-parallel rank, by one process."""
    found: dict[str, list[tuple]] = {}

    def of(family: str) -> list[tuple]:
        if family not in found:
            folder = family_folder(family)
            num_ranks = len(ROUNDS[0])
            found[family] = [alone(greedy, folder, dp_rank) for dp_rank in range(num_ranks)]
        return found[family]

    return of


@pytest.mark.parametrize(("family", "spread"), _cases())
def test_every_rank_has_the_logits_and_tokens_of_one_process(
    family: str,
    spread: Spread,
    family_folder: Callable[[str], Path],
    expected: Callable[[str], list[tuple]],
    ranks: Ranks,
) -> None:
    found = ranks.run(greedy, family_folder(family), **spread.options)
    assert len(found) == spread.tp_size * spread.dp_size
    for rank, (logits, token_ids) in enumerate(found):
        expected_logits, expected_token_ids = expected(family)[rank // spread.tp_size]
        assert token_ids == expected_token_ids
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-3)
