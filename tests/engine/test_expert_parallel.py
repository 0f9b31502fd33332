"""What experts dealt out over ranks send, counted, by every way of getting there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engine.parallel_matrix import COMMS
from tests.engine.rank_jobs import EXPERTS, HIDDEN, forward_counts, moe_step, routes
from tests.engine.ranks import Ranks, alone

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module", params=["qwen3-moe", "deepseek-v3"])
def folder(request: pytest.FixtureRequest, family_folder: Callable[[str], Path]) -> Path:
    return family_folder(request.param)


def test_collectives_of_a_sparse_layer_are_those_of_the_formula(ranks: Ranks) -> None:
    tp, num_rows, row_bytes = 4, 32, HIDDEN * 4
    x = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(1))
    expected, _ = alone(moe_step, x)
    owner = torch.arange(num_rows)[:, None] // (num_rows // tp)
    num_remote = int((alone(routes, x) // (EXPERTS // tp) != owner).sum())
    # Of all ranks together: what is routed elsewhere goes there and comes back; and the sizes.
    all_to_all = 2 * num_remote * row_bytes + tp * (tp - 1) * (EXPERTS // tp) * 8
    whole = (tp - 1) * num_rows * row_bytes  # what an AllGather of all rows sends, of all ranks
    formulas = {
        "zero_redundancy": {"ep.all_to_all": (3, all_to_all)},
        "allreduce": {"ep.all_to_all": (3, all_to_all), "tp.all_gather": (1, whole)},
        "allgather": {"ep.all_reduce": (1, 2 * whole)},
    }
    for moe_comm, formula in formulas.items():
        found = ranks.run(moe_step, x, tp_size=tp, ep_size=tp, moe_comm=moe_comm)
        outputs = [out for out, _ in found]
        if moe_comm == "zero_redundancy":
            outputs = [torch.cat(outputs)]
        for out in outputs:
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        counts = {
            kind: (found[0][1][kind][0], sum(count[kind][1] for _, count in found))
            for kind in found[0][1]
        }
        assert counts == formula, moe_comm


def test_scattered_rows_move_no_more_than_an_allreduce_and_spare_the_gather(
    folder: Path, ranks: Ranks
) -> None:
    """Of a model with one dense and one sparse layer; rows, and latents, of 64 float32."""
    half = 6 * 64 * 4 // 2  # what one ReduceScatter or AllGather of the rows sends, of one rank
    counts = {
        moe_comm: ranks.run(forward_counts, folder, tp_size=2, ep_size=2, moe_comm=moe_comm)[0]
        for moe_comm in COMMS
    }
    logits = 6 * 96 // 2 * 4
    scattered = counts["zero_redundancy"]
    # Embedding, two attentions, one dense MLP; and their counterparts, with the last norm.
    assert scattered["tp.reduce_scatter"] == (4, 4 * half)
    assert scattered["tp.all_gather"] == (5, 4 * half + logits)
    assert "tp.all_reduce" not in scattered
    assert counts["allreduce"]["tp.all_reduce"] == (4, 4 * 2 * half)
    assert counts["allreduce"]["tp.all_gather"] == (2, half + logits)
    assert counts["allgather"]["tp.all_reduce"] == (4, 4 * 2 * half)
    assert counts["allgather"]["ep.all_reduce"] == (1, 2 * half)
