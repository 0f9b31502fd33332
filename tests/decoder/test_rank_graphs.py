"""Ranks that compute a pass together replay graphs together, or none of them does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.decoder.graph_jobs import NUM_TOKENS, Decoded, decode
from tests.engine.ranks import Ranks, alone
from tests.engine.tiny import tiny_hf

pytestmark = pytest.mark.multiprocess

NUM_REPLAYS = max(NUM_TOKENS) - 1  # the first step computes the prompts
PROMPTS = {"prompt tokens in the batch"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary, which both ranks share, is one table for both ends."""
    folder = tmp_path_factory.mktemp("qwen2")
    tiny_hf(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
def test_graphs_in_pieces_give_the_tokens_of_one_rank(
    options: dict[str, Any], ranks: Ranks, folder: Path
) -> None:
    expected: Decoded = alone(decode, folder)
    eager: list[Decoded] = ranks.run(decode, folder, (0, 1), tp_size=2, **options)
    found: list[Decoded] = ranks.run(decode, folder, tp_size=2, **options)
    for rank, slow in zip(found, eager, strict=True):
        assert rank.tokens == slow.tokens == expected.tokens
        assert (rank.num_replays, rank.eager) == (NUM_REPLAYS, PROMPTS)
        # A replayed collective is counted as any other, and one that is written down is not.
        assert rank.calls == slow.calls
        assert slow.num_replays == 0


def test_experts_whose_width_is_split_are_captured(ranks: Ranks, tmp_path: Path) -> None:
    tiny_hf(Qwen3MoeForCausalLM, Qwen3MoeConfig, **EXPERTS).save_pretrained(tmp_path)
    expected: Decoded = alone(decode, tmp_path)
    assert (expected.num_replays, expected.eager) == (NUM_REPLAYS, PROMPTS)
    for rank in ranks.run(decode, tmp_path, tp_size=2):
        assert rank.tokens == expected.tokens
        assert (rank.num_replays, rank.eager) == (NUM_REPLAYS, PROMPTS)


def test_what_one_rank_cannot_capture_none_replays_and_all_say_whose_problem_it_is(
    ranks: Ranks, folder: Path
) -> None:
    expected: Decoded = alone(decode, folder)
    for rank in ranks.run(decode, folder, (1,), tp_size=2):
        assert rank.tokens == expected.tokens
        assert rank.num_replays == 0
        assert rank.eager == {"native graphs: rank 1: out of memory"}


def test_experts_over_ranks_are_not_captured_and_every_rank_says_so(
    ranks: Ranks, tmp_path: Path
) -> None:
    tiny_hf(Qwen3MoeForCausalLM, Qwen3MoeConfig, **EXPERTS).save_pretrained(tmp_path)
    expected: Decoded = alone(decode, tmp_path)
    first, second = ranks.run(decode, tmp_path, tp_size=2, ep_size=2)
    assert first.tokens == second.tokens == expected.tokens
    assert first.eager == second.eager
    (reason,) = first.eager
    assert reason.startswith("native graphs: rank 0: ")
