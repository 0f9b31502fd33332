"""Rows of every step dealt out over ranks: what one process computes, in equal shares."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.context_parallel import deal
from tests.engine.parallel_matrix import COMMS, DENSE, FAMILIES
from tests.engine.rank_jobs import context_states, greedy
from tests.engine.ranks import Ranks, alone

pytestmark = pytest.mark.multiprocess

_HIDDEN_BYTES = 64 * 4
Spread = dict[str, Any]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("min_tokens", [1, 8, 1000])
def test_every_row_is_computed_once_in_the_order_of_the_batch(size: int, min_tokens: int) -> None:
    for seqlens in ([1], [5, 1, 17, 1, 64], [999, 1001], [3] * 20, [7, 8]):
        dealt = deal(seqlens, size, min_tokens)
        assert len(dealt) == size
        rows = [(p.sequence, row) for part in dealt for p in part for row in range(p.start, p.stop)]
        assert sorted(rows) == [(i, row) for i, n in enumerate(seqlens) for row in range(n)]
        assert all(part == sorted(part, key=lambda p: (p.sequence, p.start)) for part in dealt)
        for i, n in enumerate(seqlens):
            holders = [part for part in dealt if any(p.sequence == i for p in part)]
            assert n >= min_tokens or len(holders) == 1, "a short sequence was split"


def test_ranks_have_equal_rows_and_equal_attention_of_a_long_prompt() -> None:
    for length, size in product((4096, 5003), (2, 4, 8)):
        dealt = deal([length], size, 64)
        rows = [sum(map(len, part)) for part in dealt]
        assert max(rows) - min(rows) <= 2
        scores = [sum(sum(range(p.start + 1, p.stop + 1)) for p in part) for part in dealt]
        assert max(scores) < 1.005 * min(scores)


def test_short_prompts_are_dealt_out_evenly() -> None:
    dealt = deal([30, 10, 10, 20, 10, 10, 30], 3, 64)
    assert [sum(map(len, part)) for part in dealt] == [40, 40, 40]


def _cases() -> list[object]:
    cases = []
    for family in FAMILIES:
        spreads: list[Spread] = [{"cp_size": 2}, {"cp_size": 4}, {"cp_size": 2, "tp_size": 2}]
        spreads.append({"cp_size": 2, "tp_size": 2, "sequence_parallel": True})
        spreads.append({"cp_size": 2, "layer_sharding": ("o_proj", "down_proj")})
        if family not in DENSE:
            over = product((1, 2), (2, 4), COMMS, ("all_to_all", "gather"))
            spreads += [
                {
                    "cp_size": 4 // tp,
                    "tp_size": tp,
                    "ep_size": ep,
                    "moe_comm": moe_comm,
                    "moe_exchange": exchange,
                }
                for tp, ep, moe_comm, exchange in over
            ]
        for spread in spreads:
            name = " ".join(f"{value}" for value in spread.values())
            marks = () if (family, name) in _QUICK else pytest.mark.slow
            cases.append(pytest.param(family, spread, id=f"{family}: {name}", marks=marks))
    return cases


# cp, tp, ep and how rows get to the experts. The rest is marked slow.
_QUICK = {
    ("llama", "2"),
    ("qwen3", "2 ('o_proj', 'down_proj')"),
    ("mistral", "4"),
    ("qwen2, tied", "2 2 True"),
    ("qwen3-moe", "2 2"),
    ("deepseek-v2", "4"),
    ("deepseek-v3", "2 2 4 zero_redundancy all_to_all"),
    ("deepseek-v3", "4 1 4 zero_redundancy gather"),
    ("qwen3-moe", "4 1 2 allgather all_to_all"),
}


@pytest.mark.parametrize(("family", "spread"), _cases())
def test_logits_and_tokens_are_those_of_one_process(
    family: str, spread: Spread, family_folder: Callable[[str], Path], ranks: Ranks
) -> None:
    """Chunks of one to five tokens, split or not: ranks have few rows, or none."""
    folder = family_folder(family)
    expected_logits, expected_token_ids = alone(greedy, folder, 0)
    for logits, token_ids in ranks.run(greedy, folder, 0, cp_min_tokens=3, **spread):
        assert token_ids == expected_token_ids
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "cache_dtype", "row_width"),
    [("llama", "float32", 2 * 2 * 16), ("deepseek-v3", "int8", None)],
)
def test_every_rank_has_the_caches_of_one_process_and_sends_its_rows_once(
    family: str,
    cache_dtype: str,
    row_width: int | None,
    family_folder: Callable[[str], Path],
    ranks: Ranks,
) -> None:
    size, folder = 2, family_folder(family)
    states, caches, _ = alone(context_states, folder, cache_dtype, None)
    found = ranks.run(context_states, folder, cache_dtype, None, cp_size=size, cp_min_tokens=32)
    for own_states, own_caches, _ in found:
        torch.testing.assert_close(own_states, states, rtol=0, atol=1e-3)
        for ours, theirs, first in zip(own_caches, caches, found[0][1], strict=True):
            assert torch.equal(ours.view(torch.uint8), first.view(torch.uint8))
            if ours.dtype == torch.int8:
                # A number that lies between two of the cache's may be rounded to either.
                assert (ours.int() - theirs.int()).abs().max() <= 1
            else:
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)
    if row_width is None:
        return
    # Most rows of a rank in each step, of 1 + 50 + 3 + 50 + 50, 40 + 50 and 31 tokens.
    most = 78 + 45 + 31
    layers, rest = 2 * most * row_width * 4, most * _HIDDEN_BYTES
    assert [counts for *_, counts in found] == [{"cp.all_gather": (9, layers + rest)}] * size


def test_states_that_nobody_reads_are_not_sent(
    family_folder: Callable[[str], Path], ranks: Ranks
) -> None:
    folder = family_folder("llama")
    (first, *_), *_ = alone(context_states, folder, "float32", None)
    wanted = [0, 3, 30]
    for states, _, counts in ranks.run(
        context_states, folder, "float32", wanted, cp_size=2, cp_min_tokens=32
    ):
        torch.testing.assert_close(states[0][wanted], first[wanted], rtol=0, atol=1e-3)
        assert not states[0][[i for i in range(len(first)) if i not in wanted]].any()
        assert counts["cp.all_gather"][0] == 9
    for *_, counts in ranks.run(context_states, folder, "float32", [], cp_size=2):
        assert counts["cp.all_gather"][0] == 6, "the layers' alone"
