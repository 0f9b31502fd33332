"""Products have the same bits however many threads share them: none sums across two chunks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cpu.options import ActivationBits, CpuOptions
from kernels.ops import Ops, select_ops
from tests.kernels.quantized_weights import FORMS, HALVES, make_weight
from tests.kernels.threads import COUNTS, computing_with

# Few panels and many, cut evenly by no number of threads; rows of decoding, of a prompt, and more
# than are rounded at a time.
SHAPES = [(130, 1000), (1000, 130)]
NUM_ROWS = (1, 2, 7, 40, 1100)
GROUP_SIZES = ([1, 0, 2, 1], [0, 5, 0, 0], [7, 300, 0, 41])


def assert_same_bits(compute: Callable[[], Tensor]) -> None:
    found = []
    for count in COUNTS:
        with computing_with(count):
            found.append(compute())
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_linears_of_floats(cpu: Ops, num_outputs: int, num_inputs: int, num_rows: int) -> None:
    linear = cpu.linear(torch.randn(num_outputs, num_inputs), torch.randn(num_outputs))
    x = torch.randn(num_rows, num_inputs)
    assert_same_bits(lambda: linear(x))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("form", [*FORMS, *HALVES])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_linears_of_quantised_weights(
    form: str, bits: ActivationBits, num_outputs: int, num_inputs: int
) -> None:
    ops = select_ops("cpu", cpu=CpuOptions(activation_bits=bits))
    linear = ops.quantized_linear(make_weight(form, num_outputs, num_inputs), None)
    for num_rows in NUM_ROWS:
        x = torch.randn(num_rows, num_inputs)
        assert_same_bits(lambda x=x: linear(x))


@pytest.mark.parametrize("sizes", GROUP_SIZES)
def test_experts_of_floats(cpu: Ops, sizes: list[int]) -> None:
    grouped = cpu.grouped_linear(torch.randn(len(sizes), 130, 100))
    x = torch.randn(sum(sizes), 100)
    assert_same_bits(lambda: grouped(x, torch.tensor(sizes)))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("form", [*FORMS, *HALVES])
def test_experts_of_quantised_weights(form: str, bits: ActivationBits) -> None:
    ops = select_ops("cpu", cpu=CpuOptions(activation_bits=bits))
    grouped = ops.grouped_quantized_linear([make_weight(form, 130, 100, i) for i in range(4)])
    for sizes in GROUP_SIZES:
        x = torch.randn(sum(sizes), 100)
        assert_same_bits(lambda x=x, sizes=sizes: grouped(x, torch.tensor(sizes)))
