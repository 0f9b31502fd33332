"""Shared experts whole or split, after the routed ones or beside: the logits of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.parallel_config import ParallelConfig
from tests.engine.rank_jobs import ROUNDS, greedy, shared_threads
from tests.engine.ranks import Ranks, alone

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def folder(family_folder: Callable[[str], Path]) -> Path:
    return family_folder("deepseek-v3")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[Any, Any]]:
    return [alone(greedy, folder, dp_rank) for dp_rank in range(len(ROUNDS[0]))]


@pytest.mark.parametrize(
    "options",
    [
        {"shared_experts": "tp", "moe_comm": "zero_redundancy"},
        {"shared_experts": "tp", "moe_comm": "allreduce"},
        {"shared_experts": "tp", "moe_comm": "allgather"},
        {"shared_experts_beside": True, "moe_comm": "zero_redundancy"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_logits_and_tokens_are_those_of_one_process(
    options: dict[str, Any], folder: Path, expected: list[tuple[Any, Any]], ranks: Ranks
) -> None:
    found = ranks.run(greedy, folder, tp_size=2, dp_size=2, ep_size=4, **options)
    for rank, (logits, tokens) in enumerate(found):
        expected_logits, expected_tokens = expected[rank // 2]
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-3)
        assert tokens == expected_tokens


def test_the_switch_moves_shared_experts_to_a_thread_of_their_own(
    folder: Path, ranks: Ranks
) -> None:
    sizes = {"tp_size": 2, "ep_size": 2}
    assert ranks.run(shared_threads, folder, **sizes) == [{"MainThread"}] * 2
    beside = ranks.run(shared_threads, folder, shared_experts_beside=True, **sizes)
    assert beside == [{"side_0"}] * 2
    with pytest.raises(ValueError, match="shared_experts replicated"):
        ParallelConfig(shared_experts="tp", shared_experts_beside=True)
