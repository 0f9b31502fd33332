"""Drawn tokens against the specification, in rows as wide as vocabularies are."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.drawing import DrawParams, draw
from kernels.ops import Ops, select_ops


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops("cpu")


def column(values: list[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype).unsqueeze(1)


def draw_params(
    vocab_size: int,
    *,
    temperature: list[float],
    min_p: list[float],
    top_k: list[int],
    top_p: list[float],
) -> DrawParams:
    """As the engine makes them: an option that no row uses is None; top_k 0 is off."""
    used = [k for k in top_k if 0 < k < vocab_size]
    log_min_p = [math.log(p) if p else -math.inf for p in min_p]
    return DrawParams(
        column([1 / t for t in temperature], torch.float32),
        column(log_min_p, torch.float32) if any(min_p) else None,
        column([float(k or vocab_size) for k in top_k], torch.int64) if used else None,
        column(top_p, torch.float64) if any(p < 1 for p in top_p) else None,
        max(used, default=0),
    )


def random_logits(generator: torch.Generator, num_rows: int, vocab_size: int, spread: float):
    """A few that stand out, as a model's do."""
    logits = torch.randn(num_rows, vocab_size, generator=generator) * spread
    return logits + 6 * (torch.rand(num_rows, vocab_size, generator=generator) < 0.002)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 5),
    vocab_size=st.sampled_from([1, 2, 7, 127, 128, 129, 1000, 5000, 49152]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 8.0, 300.0]),
    num_equal=st.sampled_from([0, 3, 50]),
    share_banned=st.sampled_from([0.0, 0.5, 0.999]),
    options=st.data(),
)
def test_tokens_are_those_of_the_specification(
    ops, seed, num_rows, vocab_size, spread, num_equal, share_banned, options
):
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(generator, num_rows, vocab_size, spread)
    logits[:, :num_equal] = 1.0
    logits[torch.rand(logits.shape, generator=generator) < share_banned] = -math.inf

    def of_rows(values: st.SearchStrategy) -> list:
        return options.draw(st.lists(values, min_size=num_rows, max_size=num_rows))

    params = draw_params(
        vocab_size,
        temperature=of_rows(st.sampled_from([0.1, 0.7, 1.0, 1.8])),
        min_p=of_rows(st.sampled_from([0.0, 0.0, 0.02, 0.3])),
        top_k=of_rows(st.one_of(st.just(0), st.integers(1, vocab_size))),
        top_p=of_rows(st.sampled_from([1.0, 0.05, 0.5, 0.9, 0.999999])),
    )
    numbers = torch.rand(num_rows, generator=generator, dtype=torch.float64)
    before = logits.clone()
    tokens = ops.draw(logits, params, numbers)
    assert torch.equal(logits, before)
    wanted = draw(logits, params, numbers)
    assert_on_the_same_border(tokens, wanted, logits, params, numbers)


def assert_on_the_same_border(
    tokens: Tensor, wanted: Tensor, logits: Tensor, params: DrawParams, numbers: Tensor
) -> None:
    """Equal, or drawn by a slightly smaller or larger number: sums differ in their last bits.

    NOTE: both exponentials are within 20 units in the last place: 1.2e-6 of a weight.
    """
    for row in (tokens != wanted).nonzero().flatten().tolist():
        shifts = torch.tensor([-1e-5, 1e-5], dtype=torch.float64)
        one = DrawParams(
            *(
                None if values is None else values[[row, row]]
                for values in (
                    params.inverse_temperature,
                    params.log_min_p,
                    params.top_k,
                    params.top_p,
                )
            ),
            params.max_top_k,
        )
        near = draw(logits[[row, row]], one, (numbers[row] + shifts).clamp(0, 1 - 1e-12))
        assert int(near[0]) <= int(tokens[row]) <= int(near[1])


def test_a_row_draws_alone_what_it_draws_in_a_batch(ops):
    generator = torch.Generator().manual_seed(2)
    logits = random_logits(generator, 16, 3000, 2.0)
    options = {
        "temperature": [0.5, 1.0] * 8,
        "min_p": [0.0] * 15 + [0.1],
        "top_k": [0, 40, 0, 7] * 4,
        "top_p": [1.0, 0.9] * 8,
    }
    numbers = torch.rand(16, generator=generator, dtype=torch.float64)
    together = ops.draw(logits, draw_params(3000, **options), numbers)
    for row in range(16):
        alone = draw_params(3000, **{name: [values[row]] for name, values in options.items()})
        one = ops.draw(logits[row : row + 1], alone, numbers[row : row + 1])
        assert one.tolist() == [together[row]]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_odd_logits_give_some_token(ops, odd, share):
    generator = torch.Generator().manual_seed(3)
    logits = random_logits(generator, 6, 700, 2.0)
    logits[torch.rand(logits.shape, generator=generator) < share] = odd
    numbers = torch.rand(6, generator=generator, dtype=torch.float64)
    for top_k, top_p in ((0, 1.0), (5, 1.0), (600, 1.0), (0, 0.9), (9, 0.5)):
        params = draw_params(
            700, temperature=[0.8] * 6, min_p=[0.0] * 6, top_k=[top_k] * 6, top_p=[top_p] * 6
        )
        tokens = ops.draw(logits, params, numbers)
        assert ((tokens >= 0) & (tokens < 700)).all()
        if share < 1 and odd != math.inf:
            assert logits.gather(1, tokens[:, None]).isfinite().all()


def test_the_largest_is_the_first_of_equals(ops):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(0, 40, (50, 3001), generator=generator).float()
    wanted = [row.tolist().index(row.max().item()) for row in logits]
    assert ops.argmax(logits).tolist() == wanted
    assert ops.argmax(logits[:, 1:700]).tolist() == [
        row.tolist().index(row.max().item()) for row in logits[:, 1:700]
    ]


def test_the_largest_is_a_number_where_there_is_one(ops):
    nan, inf = math.nan, math.inf
    logits = torch.tensor([[nan, -inf, -3.0], [-inf, -inf, -inf], [nan, nan, nan], [1.0, inf, nan]])
    assert ops.argmax(logits).tolist() == [2, 0, 0, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numbers": torch.zeros(2)}, "numbers must be 2 contiguous Double"),
        ({"numbers": torch.zeros(3, dtype=torch.float64)}, "numbers must be 2 contiguous Double"),
        ({"top_k": torch.ones(2, 1)}, "top_k must be 2 contiguous Long"),
        ({"logits": torch.zeros(2, 0)}, "logits are of no tokens"),
        ({"logits": torch.zeros(2, 8, dtype=torch.float64)}, "logits must be float32"),
        ({"logits": torch.zeros(8, 2).T}, "logits must be contiguous in its last dim"),
    ],
)
def test_tensors_of_another_form_are_refused(ops, change, message):
    arguments = {
        "logits": torch.zeros(2, 8),
        "inverse_temperature": torch.ones(2, 1),
        "log_min_p": None,
        "top_k": None,
        "top_p": None,
        "numbers": torch.zeros(2, dtype=torch.float64),
    } | change
    with pytest.raises(RuntimeError, match=message):
        torch.ops.pdserve_cpu.draw(*arguments.values())
