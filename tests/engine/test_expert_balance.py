"""Hot experts are copied and spread until ranks have equal loads, and nothing that is computed
changes by it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine.collectives import SingleGroup
from engine.config import MoEConfig
from engine.expert_balancer import ExpertBalancer
from engine.expert_files import read_placements, write_heat, write_placements
from engine.expert_placement import ExpertPlacement, moves
from engine.expert_planner import imbalance, near, plan
from engine.parallel import Parallel
from engine.parallel_config import EplbConfig, ParallelConfig
from engine.slot_table import SlotTable
from tests.engine.rank_jobs import balanced_logits
from tests.engine.ranks import Ranks
from tests.engine.tiny import tiny_hf

NUM_EXPERTS, INTERVAL = 16, 8


def _zipf(num_experts: int, exponent: float = 1.0, seed: int = 0) -> list[float]:
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))
    return [1000.0 / (1 + int(i)) ** exponent for i in order]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_plan_holds_every_expert_and_none_twice_on_a_rank(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 9))
    num_experts = data.draw(st.integers(1, 24))
    redundant = [
        n for n in range(num_experts * (num_ranks - 1) + 1) if (num_experts + n) % num_ranks == 0
    ]
    if not redundant:
        return
    num_redundant = data.draw(st.sampled_from(redundant))
    load = data.draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    placement = plan(load, num_redundant=num_redundant, num_ranks=num_ranks)
    # ExpertPlacement itself refuses an expert that is missing, or twice on a rank.
    assert placement.num_slots == num_experts + num_redundant
    before = plan(load[::-1], num_redundant=num_redundant, num_ranks=num_ranks)
    renamed = near(placement, before)
    assert imbalance(load, renamed) == pytest.approx(imbalance(load, placement))
    assert len(moves(before, renamed)) <= len(moves(before, placement))
    held = list(before.experts)
    for move in moves(before, renamed):
        assert before.experts[move.source] == move.expert
        held[move.target] = move.expert
    assert tuple(held) == renamed.experts


@pytest.mark.parametrize(
    ("num_experts", "num_redundant", "num_ranks"), [(256, 32, 32), (256, 64, 64), (128, 16, 16)]
)
@pytest.mark.parametrize("exponent", [0.5, 0.8, 1.0])
def test_a_skewed_load_is_spread_to_within_15_percent(
    num_experts: int, num_redundant: int, num_ranks: int, exponent: float
) -> None:
    load = _zipf(num_experts, exponent)
    contiguous = ExpertPlacement.contiguous(num_experts, num_ranks)
    planned = plan(load, num_redundant=num_redundant, num_ranks=num_ranks)
    assert imbalance(load, contiguous) > 1.4
    assert imbalance(load, planned) < 1.15


def test_groups_of_experts_stay_within_a_node() -> None:
    load = _zipf(64, 0.5)
    placement = plan(load, num_redundant=16, num_ranks=8, num_nodes=2, num_groups=8)
    for group in range(8):
        nodes = {
            rank // 4
            for rank in range(8)
            for expert in placement.of_rank(rank)
            if expert // 8 == group
        }
        assert len(nodes) == 1
    assert imbalance(load, placement) < 1.15


def test_rows_take_the_copies_of_an_expert_in_turn() -> None:
    table = SlotTable(plan([9.0, 1, 1, 1], num_redundant=2, num_ranks=2))
    copies = table(torch.zeros(6, 1, dtype=torch.int64), first_turn=1).flatten().tolist()
    assert len(set(copies)) == 2
    assert copies == copies[:2] * 3
    table.set(plan([1.0, 1, 9, 1], num_redundant=2, num_ranks=2))
    assert len(set(table(torch.full((2, 1), 2), first_turn=0).flatten().tolist())) == 2


def test_files_that_do_not_fit_are_refused_with_the_layer(tmp_path: Path) -> None:
    path = tmp_path / "experts.json"
    sizes = {"num_experts": 4, "num_redundant": 2, "num_ranks": 2}
    write_heat(path, {1: [5, 1, 1, 1]})
    planned = read_placements(path, [1], **sizes)
    assert planned == {1: plan([5, 1, 1, 1], num_redundant=2, num_ranks=2)}
    write_placements(path, planned)
    assert read_placements(path, [1], **sizes) == planned
    for text, problem in (
        ("[]", 'neither "heat" nor "placement"'),
        ("{", "no JSON"),
        ('{"heat": {"1": [1, 2]}}', "layer 1 needs 4 numbers"),
        ('{"heat": {"2": [1, 2, 3, 4]}}', r"no layers \[1\]"),
        ('{"placement": {"1": [[0, 1, 2], [3, 0]]}}', r"layer 1 has \[3, 2\] experts by rank"),
        ('{"placement": {"1": [[0, 1, 2], [0, 1, 2]]}}', r"layer 1: experts \[3\] have no slot"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=problem):
            read_placements(path, [1], **sizes)


class TwoRanks(SingleGroup):
    size = 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"heat_file": "/none/heat.json"}, "its folder does not exist"),
        ({"mode": "dynamic", "num_nodes": 3}, "num_nodes is 3: must divide ep"),
        ({"mode": "dynamic", "num_redundant_experts": 5}, "sum is not a multiple of ep_size 2"),
        ({"mode": "dynamic", "num_redundant_experts": 18}, "at most 16: one copy of 16 experts"),
    ],
)
def test_settings_that_do_not_fit_the_model_or_the_ranks_are_refused(
    options: dict[str, Any], problem: str
) -> None:
    config = MoEConfig(
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        intermediate_size=16,
        norm_topk_prob=True,
        layers=frozenset({0}),
    )
    spread = ParallelConfig(dp_size=2, ep_size=2, eplb=EplbConfig(**options))
    with pytest.raises(ValueError, match=problem):
        ExpertBalancer({}, config, Parallel(config=spread, ep=TwoRanks()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_hf(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        num_hidden_layers=3,
        head_dim=16,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_only_layers=[0],
        max_position_embeddings=2048,
    ).save_pretrained(folder)
    return folder


def _hottest(counts: list[Tensor], steps: slice) -> Tensor:
    """Rows of the hottest rank over the mean, of each sparse layer in these steps."""
    rows = torch.stack([c[steps].sum(dim=0) for c in counts]).double()
    return rows.amax(dim=0) / rows.mean(dim=0)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("sizes", "quantization"),
    [
        ({"dp_size": 4, "ep_size": 4}, "none"),
        ({"tp_size": 2, "dp_size": 2, "ep_size": 4, "dual_batch_overlap": True}, "int8"),
        ({"tp_size": 4, "ep_size": 4, "moe_comm": "allgather"}, "none"),
        pytest.param({"cp_size": 4, "ep_size": 4}, "none", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_experts_that_move_while_serving_balance_ranks_and_leave_logits_as_they_are(
    sizes: dict[str, Any], quantization: str, folder: Path, ranks: Ranks
) -> None:
    still = ranks.run(balanced_logits, folder, quantization, **sizes)
    eplb = EplbConfig(mode="dynamic", num_redundant_experts=8, interval_steps=INTERVAL)
    moving = ranks.run(balanced_logits, folder, quantization, eplb=eplb, **sizes)
    for (expected, _, _), (found, _, stats) in zip(still, moving, strict=True):
        assert stats.num_moved_experts > 0
        if sizes.get("moe_comm") == "allgather":  # sums over ranks in another order
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        else:
            assert all(map(torch.equal, found, expected))
    # Looked at before step 8; one layer moves before each of the next two steps.
    before = _hottest([counts for _, counts, _ in still], slice(None))
    after = _hottest([counts for _, counts, _ in moving], slice(INTERVAL + 2, None))
    assert (before > 1.2).all(), before
    assert (after < 1.15).all(), after


@pytest.mark.multiprocess
def test_a_placement_from_observed_heat_balances_from_the_first_step(
    folder: Path, ranks: Ranks, tmp_path: Path
) -> None:
    sizes = {"dp_size": 4, "ep_size": 4}
    heat = EplbConfig(heat_file=str(tmp_path / "heat.json"), interval_steps=24)
    expected = ranks.run(balanced_logits, folder, eplb=heat, **sizes)
    static = EplbConfig(mode="static", file=heat.heat_file, num_redundant_experts=8)
    found = ranks.run(balanced_logits, folder, eplb=static, **sizes)
    for (rows, _, _), (same, _, stats) in zip(expected, found, strict=True):
        assert all(map(torch.equal, same, rows))
        assert stats.num_moved_experts == 0
    assert (_hottest([counts for _, counts, _ in found], slice(None)) < 1.15).all()
    with pytest.raises(AssertionError, match="num_redundant_experts 7: their sum"):
        ranks.run(balanced_logits, folder, eplb=replace(static, num_redundant_experts=7), **sizes)
