"""Linears that one rank holds for all: memory falls by what is dealt out, logits stay."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.rank_jobs import greedy, resident_bytes
from tests.engine.ranks import Ranks, alone
from tests.engine.tiny import tiny_hf

pytestmark = pytest.mark.multiprocess

NUM_LAYERS, HIDDEN = 12, 256


@pytest.fixture(scope="module")
def latent(family_folder: Callable[[str], Path]) -> Path:
    return family_folder("deepseek-v3")


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (("o_proj", "q_b_proj"), {"dp_size": 2, "ep_size": 2}),
        (("o_proj", "q_b_proj", "kv_a_proj_with_mqa"), {"tp_size": 2, "dp_size": 2, "ep_size": 2}),
        (("q_a_proj", "down_proj"), {"tp_size": 4, "ep_size": 4, "moe_comm": "allreduce"}),
    ],
)
def test_logits_are_those_of_one_process(
    names: tuple[str, ...], sizes: dict[str, Any], latent: Path, ranks: Ranks
) -> None:
    if "down_proj" in names:  # of a dense layer it is split, and there is no second copy
        with pytest.raises(AssertionError, match="layer_sharding of down_proj: no other rank"):
            ranks.run(greedy, latent, layer_sharding=names, **sizes)
        names = names[:1]
    expected = [alone(greedy, latent, dp_rank) for dp_rank in range(2)]
    found = ranks.run(greedy, latent, layer_sharding=names, **sizes)
    for rank, (logits, tokens) in enumerate(found):
        expected_logits, expected_tokens = expected[rank // sizes.get("tp_size", 1)]
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-3)
        assert tokens == expected_tokens


def test_memory_falls_by_the_layers_of_the_other_ranks(ranks: Ranks, tmp_path: Path) -> None:
    tiny_hf(
        LlamaForCausalLM,
        LlamaConfig,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
    ).save_pretrained(tmp_path)
    layer = HIDDEN * HIDDEN * 4
    whole = ranks.run(resident_bytes, tmp_path, dp_size=4)
    dealt = ranks.run(resident_bytes, tmp_path, dp_size=4, layer_sharding=("o_proj",))
    # Three of twelve layers, and two buffers.
    expected = layer * (NUM_LAYERS - NUM_LAYERS // 4 - 2)
    for (before, _, logits), (after, reported, same) in zip(whole, dealt, strict=True):
        assert before - after == pytest.approx(expected, rel=0.05)
        assert reported.whole - reported.held == pytest.approx(expected, rel=0.05)
        assert all(map(torch.equal, same, logits))


def test_names_that_the_model_has_not_are_refused(latent: Path, ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"layer_sharding names qq: the model has .*q_b_proj"):
        ranks.run(greedy, latent, dp_size=2, layer_sharding=("qq",))
