"""Gating and grouped products: the reference against plain formulas, the backend against it.

Tolerance as in test_linear.
"""

import pytest
import torch

from kernels.ops import GroupedLinear, Ops
from tests.kernels.tolerance import linear_tolerance


def _weight(num_groups: int, out_features: int, in_features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_groups * 10007 + out_features)
    return torch.randn(num_groups, out_features, in_features, generator=generator) / (
        in_features**0.5
    )


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    ops: Ops = request.getfixturevalue(request.param)
    return ops


@pytest.mark.parametrize(
    "sizes", [[0, 3, 0, 70, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 9], [0, 0, 0, 0, 0, 0]]
)
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (65, 37), (1, 3)])
def test_every_row_meets_the_weight_of_its_group(
    ops: Ops, sizes: list[int], out_features: int, in_features: int
) -> None:
    weight = _weight(len(sizes), out_features, in_features)
    grouped = ops.grouped_linear(weight.clone())
    assert isinstance(grouped, GroupedLinear)
    assert grouped.num_groups == len(sizes)
    assert (grouped.out_features, grouped.in_features) == (out_features, in_features)
    x = torch.randn(sum(sizes), in_features)
    y = grouped(x, torch.tensor(sizes))
    assert y.shape == (sum(sizes), out_features)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    expected = (weight[groups] @ x[:, :, None])[:, :, 0]
    torch.testing.assert_close(y, expected, rtol=0, atol=linear_tolerance(in_features))


def test_rows_of_x_may_be_strided_and_nothing_beside_them_is_read(ops: Ops) -> None:
    grouped = ops.grouped_linear(_weight(3, 50, 40))
    x = torch.full((9, 100), torch.nan)
    x[2:7, 30:70] = torch.randn(5, 40)
    sizes = torch.tensor([2, 0, 3])
    part = x[2:7, 30:70]
    expected = grouped(part.contiguous(), sizes)
    assert expected.isfinite().all()
    torch.testing.assert_close(grouped(part, sizes), expected, rtol=0, atol=linear_tolerance(40))


def test_a_row_of_nan_stays_in_its_row(ops: Ops) -> None:
    grouped = ops.grouped_linear(_weight(2, 33, 20))
    x = torch.randn(8, 20)
    x[5] = torch.nan
    y = grouped(x, torch.tensor([3, 5]))
    assert y[5].isnan().all()
    assert y[[0, 1, 2, 3, 4, 6, 7]].isfinite().all()


@pytest.mark.parametrize("sizes", [[1, 2], [1, 2, 3], [4, -1, 1], [5]])
def test_sizes_that_do_not_fit_are_refused(ops: Ops, sizes: list[int]) -> None:
    grouped = ops.grouped_linear(_weight(3, 8, 8))
    with pytest.raises(ValueError, match="for 4 rows, 3 groups"):
        grouped(torch.zeros(4, 8), torch.tensor(sizes))


@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (128, 8), (3, 3), (5, 1)])
def test_gating_picks_the_largest_of_the_softmax_over_all(
    ops: Ops, num_experts: int, k: int
) -> None:
    logits = 3 * torch.randn(20, num_experts)
    topk_weights, topk_ids = ops.moe_gating_topk_softmax(logits, k)
    for row, weights, ids in zip(logits.double(), topk_weights, topk_ids, strict=True):
        ranked = sorted(range(num_experts), key=lambda expert: -row[expert])[:k]
        assert ids.tolist() == ranked
        expected = row.exp()[ranked] / row.exp().sum()
        torch.testing.assert_close(weights.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_normalized", [False, True])
def test_gating_divides_by_the_sum_where_it_is_asked_to(ops: Ops, is_normalized: bool) -> None:
    topk_weights, _ = ops.moe_gating_topk_softmax(
        torch.randn(20, 9), 4, is_normalized=is_normalized
    )
    sums = topk_weights.sum(dim=-1)
    assert bool(((sums - 1).abs() < 1e-6).all()) == is_normalized


def test_rows_without_numbers_go_to_different_experts_and_disturb_no_other(cpu: Ops) -> None:
    logits = torch.randn(5, 12)
    expected = cpu.moe_gating_topk_softmax(logits, 4)
    logits[2] = torch.nan
    logits[3, 7] = torch.nan
    topk_weights, topk_ids = cpu.moe_gating_topk_softmax(logits, 4)
    for row in (0, 1, 4):
        assert torch.equal(topk_weights[row], expected[0][row])
        assert torch.equal(topk_ids[row], expected[1][row])
    for row in (2, 3):
        assert len(set(topk_ids[row].tolist())) == 4
        assert 0 <= topk_ids[row].min() <= topk_ids[row].max() < 12


@pytest.mark.parametrize(("num_tokens", "k", "num_experts"), [(1, 2, 4), (37, 3, 5), (0, 2, 3)])
def test_rows_go_to_their_experts_in_order_and_come_back(
    ops: Ops, num_tokens: int, k: int, num_experts: int
) -> None:
    x = torch.randn(num_tokens, 50)[:, 3:40]
    ids = torch.rand(num_tokens, num_experts).argsort(dim=-1)[:, :k].contiguous()
    weights = torch.rand(num_tokens, k)
    rows, row_index, sizes = ops.moe_init_routing(x, ids, num_experts)
    expert_ids = ids.flatten()[row_index]
    assert torch.equal(sizes, torch.bincount(ids.flatten(), minlength=num_experts))
    assert torch.equal(expert_ids, expert_ids.sort(stable=True).values)
    assert torch.equal(row_index, ids.flatten().sort(stable=True).indices)
    assert torch.equal(rows, x[row_index // k])
    scaled = rows * (1 + expert_ids[:, None])
    expected = x * (weights * (1 + ids)).sum(dim=-1, keepdim=True)
    out = ops.moe_finalize_routing(scaled, row_index, weights)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_token_has_the_same_bits_however_experts_are_numbered(cpu: Ops) -> None:
    num_tokens, num_experts, k = 50, 12, 5
    experts = torch.randn(num_experts, 40)  # what each adds to a row
    ids = torch.stack([torch.randperm(num_experts)[:k] for _ in range(num_tokens)])
    weights, x = torch.rand(num_tokens, k), torch.randn(num_tokens, 40)

    def back(number: torch.Tensor) -> torch.Tensor:
        rows, row_index, sizes = cpu.moe_init_routing(x, number[ids], num_experts)
        by_number = torch.empty_like(experts).index_copy(0, number, experts)
        rows = rows + by_number.repeat_interleave(sizes, dim=0)
        return cpu.moe_finalize_routing(rows, row_index, weights)

    expected = back(torch.arange(num_experts))
    for _ in range(5):
        assert torch.equal(back(torch.randperm(num_experts)), expected)


def test_ids_that_no_expert_has_are_refused(cpu: Ops) -> None:
    with pytest.raises(IndexError, match=r"id 3 is not in \[0, 3\)"):
        cpu.moe_init_routing(torch.zeros(2, 4), torch.tensor([[0], [3]]), 3)


def test_a_sum_is_that_of_both(ops: Ops) -> None:
    x, y = torch.randn(5, 37), torch.randn(5, 37)
    assert torch.equal(ops.add(x, y), x + y)
