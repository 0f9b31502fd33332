"""The packed linear of the C++ backend against the reference.

float32 tolerance: an output is a chain of K fused multiply-adds that sum to order 1, so it errs by
at most K 6e-8 and mostly far less; plus 1e-6 for outputs up to 8 and the reference's own.
"""

import pytest
import torch

from kernels.ops import Linear, Ops
from tests.kernels.tolerance import linear_tolerance


def _weight(out_features: int, in_features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out_features * 10007 + in_features)
    return torch.randn(out_features, in_features, generator=generator) / in_features**0.5


@pytest.mark.parametrize(
    ("out_features", "in_features"),
    [
        (576, 576),
        (960, 576),
        (576, 1536),
        (100, 37),
        (33, 1000),
        (1, 1),
        (65, 64),
        (64, 65),
        (7, 3),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_the_reference(
    cpu: Ops, reference: Ops, out_features: int, in_features: int, has_bias: bool
) -> None:
    weight = _weight(out_features, in_features)
    bias = _weight(out_features, 1)[:, 0] if has_bias else None
    packed, plain = cpu.linear(weight, bias), reference.linear(weight, bias)
    assert isinstance(packed, Linear)
    assert (packed.out_features, packed.in_features) == (out_features, in_features)
    for batch in [0, *range(1, 71), 300]:
        x = torch.randn(batch, in_features)
        y = packed(x)
        assert y.shape == (batch, out_features)
        if batch:
            assert (y - plain(x)).abs().max() < linear_tolerance(in_features)


def test_a_row_has_the_same_bits_in_every_batch(cpu: Ops) -> None:
    linear = cpu.linear(_weight(130, 1000), None)
    x = torch.randn(300, 1000)
    whole = linear(x)
    for batch in (1, 2, 5, 6, 7, 12, 13, 31, 64, 299):
        assert torch.equal(linear(x[:batch]), whole[:batch])
        assert torch.equal(linear(x[-batch:]), whole[-batch:])


def test_rows_of_x_may_be_strided(cpu: Ops) -> None:
    linear = cpu.linear(_weight(50, 40), None)
    x = torch.randn(9, 100)
    assert torch.equal(linear(x[:, 30:70]), linear(x[:, 30:70].contiguous()))


def test_nothing_beside_the_operands_is_read(cpu: Ops) -> None:
    linear = cpu.linear(_weight(50, 40), None)
    x = torch.full((9, 100), torch.nan)
    x[2:5, 30:70] = 1.0
    assert linear(x[2:5, 30:70]).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_the_weight_come_back_exactly(cpu: Ops, dtype: torch.dtype) -> None:
    weight = _weight(101, 37)
    ids = torch.tensor([0, 100, 31, 32, 0], dtype=dtype)
    assert torch.equal(cpu.linear(weight, None).rows(ids), weight[ids])


def test_a_row_id_outside_the_weight_is_refused(cpu: Ops) -> None:
    linear = cpu.linear(_weight(101, 37), None)
    with pytest.raises(IndexError, match=r"id 101 is not in \[0, 101\)"):
        linear.rows(torch.tensor([101]))
