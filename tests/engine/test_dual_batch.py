"""Steps in two halves: where they are cut, who computes when, and what a failure leaves behind."""

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import MAX_DECODE_QUERIES, KVBatch
from engine.dual_batch import cut_of, halves_of, largest_half, plan_halves
from engine.parallel_config import ParallelConfig
from engine.turns import Turns
from tests.engine.rank_jobs import greedy, pushed_layers, sharded_greedy
from tests.engine.ranks import Ranks, alone

_CONFIG = ParallelConfig(dp_size=2, ep_size=2, dual_batch_overlap=True, dual_batch_min_rows=8)


def _starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize(
    ("lengths", "cut"),
    [
        ([1], 1),  # the second half is a dummy row
        ([5], 2),
        ([100], 50),
        ([1, 1, 1], 1),
        ([4, 4, 4], 4),  # between two requests, though 6 would be the middle
        ([1, 1, 30], 16),  # a chunk of a prompt may be cut
        ([20, 4, 4], 14),
        ([7, 1], 7),
    ],
)
def test_a_batch_is_cut_near_its_middle(lengths: list[int], cut: int) -> None:
    assert cut_of(_starts(lengths)) == cut


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.data())
def test_two_halves_have_every_row_once_with_the_keys_before_it(
    lengths: list[int], data: st.DataObject
) -> None:
    lengths.sort(key=lambda n: n > MAX_DECODE_QUERIES)  # decodes come first
    starts, contexts = _starts(lengths), torch.tensor(lengths).int() + 3
    kv = KVBatch(
        k_caches=(),
        v_caches=(),
        slot_mapping=torch.arange(int(starts[-1])),
        block_table=torch.arange(len(lengths))[:, None],
        cu_seqlens_q=starts,
        context_lens=contexts,
        max_seqlen_q=max(lengths),
        num_decode_seqs=0,
        num_decode_tokens=0,
    )
    rows = torch.arange(int(starts[-1]))
    for cut in (cut_of(starts), data.draw(st.integers(1, len(rows)))):
        first, second = halves_of(rows, rows, kv, cut)
        halves = [first] if second is None else [first, second]
        assert torch.equal(torch.cat([half.input_ids for half in halves]), rows)
        seen = []
        for half in halves:
            part = half.kv
            assert torch.equal(part.slot_mapping, half.input_ids)
            ranges = list(pairwise(part.cu_seqlens_q.tolist()))
            assert part.max_seqlen_q == max(stop - start for start, stop in ranges)
            decodes = ranges[: part.num_decode_seqs]
            assert all(stop - start <= MAX_DECODE_QUERIES for start, stop in decodes)
            assert part.num_decode_tokens == (decodes[-1][1] if decodes else 0)
            for (start, stop), sequence, context in zip(
                ranges, part.block_table[:, 0].tolist(), part.context_lens.tolist(), strict=True
            ):
                seen += [(sequence, context - (stop - start) + i) for i in range(stop - start)]
        assert seen == [(s, 3 + i) for s, length in enumerate(lengths) for i in range(length)]


def test_all_ranks_divide_a_step_or_none() -> None:
    decodes = [_starts([1] * 10), _starts([1])]
    assert plan_halves(decodes, _CONFIG) == [5, 1]
    assert largest_half([10, 1], [5, 1]) == 5
    assert plan_halves([_starts([1] * 7), _starts([1])], _CONFIG) == [0, 0]
    assert plan_halves(decodes, replace(_CONFIG, dual_batch_overlap=False)) == [0, 0]
    with pytest.raises(ValueError, match="tp_size or ep_size above 1"):
        ParallelConfig(dp_size=2, dual_batch_overlap=True)


class _Collective:
    """Over when it is waited for."""

    def wait(self) -> None:
        pass


def test_two_computations_change_places_at_every_collective_and_one_runs_at_a_time() -> None:
    turns, steps, running = Turns(), [], threading.Lock()

    def compute(name: str, num_collectives: int) -> str:
        for i in range(num_collectives):
            assert running.acquire(blocking=False), "both run"
            steps.append(f"{name}{i}")
            running.release()
            turns.wait(_Collective())
        return name

    for _ in range(3):
        steps.clear()
        assert turns.run(lambda: compute("a", 2), lambda: compute("b", 4)) == ("a", "b")
        assert steps == ["a0", "b0", "a1", "b1", "b2", "b3"]


@pytest.mark.parametrize("fails", ["first", "second"])
def test_one_that_fails_ends_both_and_the_next_step_is_as_any(fails: str) -> None:
    turns = Turns()

    def compute(name: str) -> str:
        turns.wait(_Collective())
        if name == fails:
            raise RuntimeError("a peer is gone")
        turns.wait(_Collective())
        return name

    with pytest.raises(RuntimeError, match="a peer is gone"):
        turns.run(lambda: compute("first"), lambda: compute("second"))
    assert turns.run(lambda: "a", lambda: "b") == ("a", "b")


@pytest.mark.multiprocess
def test_a_layer_is_pushed_when_both_halves_have_written_it(
    family_folder: Callable[[str], Path], ranks: Ranks
) -> None:
    sizes = {"tp_size": 2, "ep_size": 2}
    folder = family_folder("qwen3-moe")
    halves = ranks.run(pushed_layers, folder, dual_batch_overlap=True, **sizes)
    whole = ranks.run(pushed_layers, folder, **sizes)
    assert halves == [([0, 1], ["MainThread", "second-half_0"] * 2, True)] * 2
    assert whole == [([0, 1], ["MainThread"] * 2, True)] * 2


@pytest.mark.multiprocess
def test_weights_that_come_a_layer_ahead_come_once_for_both_halves(
    family_folder: Callable[[str], Path], ranks: Ranks
) -> None:
    """Of a model whose first layer communicates nothing."""
    folder = family_folder("qwen3-moe")
    sizes = {"dp_size": 2, "ep_size": 2, "layer_sharding": ("o_proj",)}
    halves = ranks.run(sharded_greedy, folder, dual_batch_overlap=True, **sizes)
    whole = ranks.run(sharded_greedy, folder, **sizes)
    for rank, (logits, token_ids, num_broadcasts) in enumerate(halves):
        expected, expected_ids = alone(greedy, folder, rank)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
        assert token_ids == expected_ids
        assert num_broadcasts == whole[rank][2] > 0
