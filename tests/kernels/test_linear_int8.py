"""The int8 linear of both backends against a dequantised weight.

Tolerance as in test_linear, times the scale of the outputs: the sums run over integers up to 127.
"""

import pytest
import torch

from kernels.ops import GroupedLinear, Linear, Ops


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    ops: Ops = request.getfixturevalue(request.param)
    return ops


def _weight(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 weights of any value, and scales that bring outputs to order 1."""
    generator = torch.Generator().manual_seed(shape[-1])
    weight = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    scale = (0.5 + torch.rand(shape[:-1], generator=generator)) / 74 / shape[-1] ** 0.5
    return weight, scale


def _tolerance(in_features: int) -> float:
    return 2e-7 * in_features + 2e-6


@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [(576, 576), (100, 37), (33, 1000), (1, 1), (65, 64), (64, 65), (7, 257), (32, 256)],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_that_of_the_dequantised_weight(
    ops: Ops, out_features: int, in_features: int, has_bias: bool
) -> None:
    weight, scale = _weight(out_features, in_features)
    bias = torch.randn(out_features) if has_bias else None
    linear = ops.linear_int8(weight, scale, bias)
    assert isinstance(linear, Linear)
    assert (linear.out_features, linear.in_features) == (out_features, in_features)
    plain = weight.double() * scale.double()[:, None]
    for batch in [0, *range(1, 30), 95, 96, 97, 300]:
        x = torch.randn(batch, in_features)
        expected = x.double() @ plain.T + (0 if bias is None else bias.double())
        torch.testing.assert_close(
            linear(x).double(), expected, rtol=0, atol=_tolerance(in_features)
        )


def test_a_row_has_the_same_bits_in_every_batch(cpu: Ops) -> None:
    linear = cpu.linear_int8(*_weight(130, 1000), None)
    x = torch.randn(300, 1000)
    whole = linear(x)
    for batch in (1, 2, 5, 6, 7, 12, 13, 31, 64, 95, 97, 299):
        assert torch.equal(linear(x[:batch]), whole[:batch])
        assert torch.equal(linear(x[-batch:]), whole[-batch:])


def test_nothing_beside_the_operands_is_read(ops: Ops) -> None:
    linear = ops.linear_int8(*_weight(50, 40), None)
    x = torch.full((9, 100), torch.nan)
    x[2:5, 30:70] = 1.0
    assert linear(x[2:5, 30:70]).isfinite().all()


def test_rows_of_the_weight_come_back_scaled(ops: Ops) -> None:
    weight, scale = _weight(101, 37)
    ids = torch.tensor([0, 100, 31, 32, 0], dtype=torch.int32)
    expected = weight[ids].float() * scale[ids, None]
    assert torch.equal(ops.linear_int8(weight, scale, None).rows(ids), expected)
    with pytest.raises(IndexError):
        ops.linear_int8(weight, scale, None).rows(torch.tensor([101]))


def test_every_row_meets_the_weight_of_its_group(ops: Ops) -> None:
    weight, scale = _weight(4, 50, 37)
    grouped = ops.grouped_linear_int8(weight, scale)
    assert isinstance(grouped, GroupedLinear)
    x = torch.randn(9, 37)
    y = grouped(x, torch.tensor([3, 0, 5, 1]))
    groups = torch.tensor([0, 0, 0, 2, 2, 2, 2, 2, 3])
    plain = weight[groups] * scale[groups][:, :, None]
    torch.testing.assert_close(y, (plain @ x[:, :, None])[:, :, 0], rtol=0, atol=_tolerance(37))
