"""The quantised linear of both backends against a dequantised weight."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.ops import CpuOps
from kernels.cpu.options import ActivationBits, CpuOptions
from kernels.ops import GroupedLinear, Linear, Ops, select_ops
from kernels.quantized import PaddedRows, QuantizedWeight, concat_rows, whole
from tests.kernels.quantized_weights import FORMS, HALVES, make_weight

SHAPES = [(576, 576), (100, 40), (33, 1000), (1, 1), (65, 64), (64, 65), (7, 257), (32, 256)]
BATCHES = (0, 1, 2, 3, 5, 8, 11, 12, 13, 31, 95, 97, 300)
MOST_ROWS = 1100  # more than are rounded at a time


@pytest.fixture(scope="session")
def cpu8() -> Ops:
    return select_ops("cpu", cpu=CpuOptions(activation_bits=8))


@pytest.fixture(params=["reference", "cpu", "cpu8"])
def ops(request: pytest.FixtureRequest) -> Ops:
    ops: Ops = request.getfixturevalue(request.param)
    return ops


def activation_bits(ops: Ops, weight: QuantizedWeight) -> int:
    """Of the inputs of its products; 32 for floats."""
    if ops.name == "reference" or weight.num_bits == 16:
        return 32
    return ops.options.activation_bits if isinstance(ops, CpuOps) and weight.num_bits == 4 else 16


def tolerance(num_inputs: int) -> float:
    """A float32 sum of terms of order 1 / sqrt(n)."""
    return 2e-7 * num_inputs + 2e-6


def rounding(x: Tensor, weight: QuantizedWeight, bits: int) -> Tensor:
    """How much rounded inputs can move outputs. x: [T, in] -> [T, out].

    An input moves by half a step at most, and a step is the largest of its neighbours' magnitudes
    over 2^(bits - 1) - 1.
    """
    if bits == 32:
        return torch.zeros(len(x), weight.shape[0])
    step = x.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    return 0.5001 * step * weight.dequantize().abs().sum(dim=1)


@pytest.mark.parametrize("form", [*FORMS, *HALVES])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_that_of_the_dequantised_weight(
    ops: Ops, form: str, num_outputs: int, num_inputs: int, has_bias: bool
) -> None:
    weight = make_weight(form, num_outputs, num_inputs)
    bias = torch.randn(num_outputs) if has_bias else None
    linear = ops.quantized_linear(weight, bias)
    assert isinstance(linear, Linear)
    assert (linear.out_features, linear.in_features) == (num_outputs, num_inputs)
    plain = weight.dequantize().double()
    for batch in BATCHES:
        x = torch.randn(batch, num_inputs)
        expected = x.double() @ plain.T + (0 if bias is None else bias.double())
        error = (linear(x).double() - expected).abs()
        bound = rounding(x, weight, activation_bits(ops, weight)) + tolerance(num_inputs)
        assert (error <= bound).all()


@pytest.mark.parametrize("form", HALVES)
def test_weights_of_16_bits_give_the_bits_of_the_float_linear(cpu: Ops, form: str) -> None:
    weight = make_weight(form, 130, 1000)
    bias = torch.randn(130)
    quantized, plain = cpu.quantized_linear(weight, bias), cpu.linear(weight.dequantize(), bias)
    x = torch.randn(300, 1000)
    whole = plain(x)
    for batch in BATCHES:
        assert torch.equal(quantized(x[:batch]), whole[:batch])
        assert torch.equal(quantized(x[300 - batch :]), whole[300 - batch :])


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_any_batch(form: str, bits: ActivationBits) -> None:
    cpu = select_ops("cpu", cpu=CpuOptions(activation_bits=bits))
    linear = cpu.quantized_linear(make_weight(form, 130, 1000), torch.randn(130))
    x = torch.randn(MOST_ROWS, 1000)
    whole = linear(x)
    for batch in BATCHES:
        assert torch.equal(linear(x[:batch]), whole[:batch])
        assert torch.equal(linear(x[MOST_ROWS - batch :]), whole[MOST_ROWS - batch :])


def rounded(x: Tensor, group_size: int, bits: int) -> Tensor:
    """x as a product sees it: [T, in] float64."""
    run_inputs = {8: 32, 16: 64}[bits]
    parts = []
    for group in x.split(group_size, dim=1):
        for run in group.split(run_inputs, dim=1):
            steps = torch.tensor(float(2 ** (bits - 1) - 1))
            largest = run.abs().amax(dim=1, keepdim=True)
            # The float32 arithmetic of the kernels, so that the same numbers are rounded up.
            inverse = torch.where(largest < 1e-30, 0.0, steps / largest)
            parts.append((run * inverse).round().double() * (largest / steps).double())
    return torch.cat(parts, dim=1)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(FORMS)),
    st.sampled_from([8, 16]),
    st.integers(1, 90),
    st.integers(1, 700),
    st.integers(1, 40),
    st.integers(0, 2**32),
)
def test_only_inputs_are_rounded(
    form: str, bits: ActivationBits, num_outputs: int, num_inputs: int, num_rows: int, seed: int
) -> None:
    weight = make_weight(form, num_outputs, num_inputs, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    x *= 10.0 ** torch.randint(-3, 4, (num_rows, num_inputs), generator=generator)
    x[torch.rand(num_rows, num_inputs, generator=generator) < 0.2] = 0
    bias = torch.randn(num_outputs, generator=generator) if seed % 2 else None
    plain = weight.dequantize().double()
    cpu = select_ops("cpu", cpu=CpuOptions(activation_bits=bits))
    seen = rounded(x, weight.group_size, bits if weight.num_bits == 4 else 16)
    expected = seen @ plain.T + (0 if bias is None else bias.double())
    # What cancels out within a weight, its values against its offset, does so in sums alone.
    offset = None if weight.offset is None else weight.offset.abs()
    parts = replace(weight, values=weight.values.clamp(-127).abs(), offset=offset)
    size = seen.abs() @ parts.dequantize().double().T + 1
    error = (cpu.quantized_linear(weight, bias)(x).double() - expected).abs()
    assert (error <= 3e-7 * (4 + num_inputs / 32) * size).all()


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("form", FORMS)
def test_the_largest_numbers_do_not_overflow(form: str, bits: ActivationBits) -> None:
    cpu = select_ops("cpu", cpu=CpuOptions(activation_bits=bits))
    weight = make_weight(form, 40, 640)
    weight.values.fill_(15 if weight.num_bits == 4 else -128)
    for x in (torch.full((3, 640), 1e30), torch.full((3, 640), -1e-3)):
        expected = x.double() @ weight.dequantize().double().T
        y = cpu.quantized_linear(weight, None)(x).double()
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_zeros_tiny_numbers_and_what_is_not_finite(ops: Ops, form: str) -> None:
    linear = ops.quantized_linear(make_weight(form, 40, 136), None)
    x = torch.zeros(6, 136)
    x[1] = 1e-38
    x[2, 70], x[3, 7], x[4, 135] = torch.nan, torch.inf, -torch.inf
    y = linear(x)
    assert not y[0].any()
    assert (y[1].abs() < 1e-30).all()
    assert not y[2:5].isfinite().any()
    assert not y[5].any()


@pytest.mark.parametrize("form", [*FORMS, *HALVES])
def test_nothing_beside_the_operands_is_read(ops: Ops, form: str) -> None:
    linear = ops.quantized_linear(make_weight(form, 50, 40), None)
    x = torch.full((9, 100), torch.nan)
    x[2:5, 30:70] = 1.0
    assert linear(x[2:5, 30:70]).isfinite().all()


@pytest.mark.parametrize("form", [*FORMS, *HALVES])
def test_rows_of_the_weight_come_back_dequantised(ops: Ops, form: str) -> None:
    weight = make_weight(form, 101, 40)
    ids = torch.tensor([0, 100, 31, 32, 0], dtype=torch.int32)
    rows = ops.quantized_vocabulary(weight).rows
    torch.testing.assert_close(rows(ids), weight.dequantize()[ids], rtol=1e-6, atol=1e-8)
    with pytest.raises(IndexError):
        rows(torch.tensor([101]))


def test_every_row_meets_the_weight_of_its_group(ops: Ops) -> None:
    weights = [make_weight("Q4_1", 50, 40, seed) for seed in range(4)]
    grouped = ops.grouped_quantized_linear(weights)
    assert isinstance(grouped, GroupedLinear)
    x = torch.randn(9, 40)
    y = grouped(x, torch.tensor([3, 0, 5, 1]))
    groups = (0, 0, 0, 2, 2, 2, 2, 2, 3)
    plain = torch.stack([weights[group].dequantize() for group in groups])
    error = (y - (plain @ x[:, :, None])[:, :, 0]).abs()
    bits = activation_bits(ops, weights[0])
    bounds = [rounding(row[None], weights[g], bits)[0] for row, g in zip(x, groups, strict=True)]
    assert (error <= torch.stack(bounds) + tolerance(40)).all()


@settings(deadline=None)
@given(
    st.sampled_from([*FORMS, *HALVES]),
    st.integers(1, 300),
    st.integers(0, 300),
    st.integers(0, 300),
)
def test_parts_of_a_weight_are_parts_of_its_numbers(form: str, size: int, a: int, b: int) -> None:
    weight = make_weight(form, 6, size)
    start, stop = sorted((a % (size + 1), b % (size + 1)))
    part = weight.columns(start, stop)
    if part is not None and start < stop:
        assert torch.equal(part.dequantize(), weight.dequantize()[:, start:stop])
    one_group = weight.scale.shape[1] <= 1
    assert part is not None or not one_group
    assert torch.equal(weight.rows(slice(2, 5)).dequantize(), weight.dequantize()[2:5])
    assert torch.equal(weight.padded(9).dequantize()[:6], weight.dequantize())
    assert not weight.padded(9).dequantize()[6:].any()


def test_weights_of_different_forms_go_side_by_side_if_their_groups_are_alike() -> None:
    mixed = [make_weight("Q4_1", 5, 64), make_weight("Q8_0", 3, 64)]
    fused = concat_rows(mixed)
    assert fused is not None
    expected = torch.cat([part.dequantize() for part in mixed])
    assert torch.equal(whole(fused).dequantize(), expected)
    for index in (slice(1, 3), slice(4, 7), slice(5, 8)):
        assert torch.equal(fused.rows(index).dequantize(), expected[index])
    padded = PaddedRows(fused, 12)
    assert torch.equal(whole(padded).dequantize()[:8], expected)
    for index in (slice(6, 11), slice(8, 12), slice(9, 10)):
        part = padded.rows(index)
        assert part.form == fused.form
        assert torch.equal(part.dequantize(), whole(padded).dequantize()[index])
    assert concat_rows([*mixed, make_weight("AWQ", 2, 64)]) is None


@pytest.mark.parametrize("form", [*FORMS, *HALVES])
@pytest.mark.parametrize("num_rows", [20, 700])
def test_groups_have_the_bits_of_their_linears(cpu: Ops, form: str, num_rows: int) -> None:
    weights = [make_weight(form, 70, 64, seed) for seed in range(4)]
    sizes = torch.tensor([3, 0, num_rows, 1])
    x = torch.randn(num_rows + 4, 64)
    parts = x.split(sizes.tolist())
    expected = [cpu.quantized_linear(w, None)(p) for w, p in zip(weights, parts, strict=True)]
    grouped = cpu.grouped_quantized_linear(weights)
    assert torch.equal(grouped(x, sizes), torch.cat(expected))


def test_groups_of_different_forms_have_the_bits_of_their_linears(cpu: Ops) -> None:
    weights = [make_weight(form, 70, 64) for form in ("Q8_0", "bfloat16", "Q4_1", "float16")]
    sizes = torch.tensor([3, 2, 9, 1])
    x = torch.randn(15, 64)
    parts = x.split(sizes.tolist())
    expected = [cpu.quantized_linear(w, None)(p) for w, p in zip(weights, parts, strict=True)]
    assert torch.equal(cpu.grouped_quantized_linear(weights)(x, sizes), torch.cat(expected))


def test_weights_of_16_bits_go_side_by_side_if_they_are_of_one_type() -> None:
    parts = [make_weight("bfloat16", rows, 32) for rows in (5, 3)]
    fused = concat_rows(parts)
    assert fused is not None
    assert torch.equal(whole(fused).values, torch.cat([part.values for part in parts]))
    for form in ("float16", "Q8_0"):
        assert concat_rows([*parts, make_weight(form, 2, 32)]) is None


@pytest.mark.parametrize(("dtype", "is_half"), [(torch.float16, False), (torch.bfloat16, True)])
def test_values_of_16_bits_must_be_of_the_type_that_they_are_packed_as(
    cpu: Ops, dtype: torch.dtype, is_half: bool
) -> None:
    values, scale = torch.zeros(2, 8, dtype=dtype), torch.empty(2, 0)
    with pytest.raises(RuntimeError, match="values must be contiguous"):
        torch.ops.pdserve_cpu.pack_quantized(values, scale, None, 8, 16, is_half)
    with pytest.raises(RuntimeError, match="a weight of 16 bits has no scales"):
        torch.ops.pdserve_cpu.pack_quantized(values, scale, None, 4, 16, not is_half)


@pytest.mark.parametrize(("num_bits", "input_bits"), [(8, 8), (4, 32), (4, 4)])
def test_inputs_of_other_bits_are_refused(cpu: Ops, num_bits: int, input_bits: int) -> None:
    packed = torch.empty(1, 1, dtype=torch.uint8)
    form = (4, 8, 8, num_bits, False, True)
    with pytest.raises(RuntimeError, match=f"input_bits is {input_bits}, must be 16, or 8 with"):
        torch.ops.pdserve_cpu.quantized_linear(torch.zeros(1, 8), packed, None, *form, input_bits)
