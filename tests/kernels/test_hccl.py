"""Sizes of an expert-parallel exchange, against the documented formula worked out by hand."""

from dataclasses import replace

import pytest

from kernels.ascend.hccl import (
    DEFAULT_BUFFER_MIB,
    MIB,
    ExpertExchange,
    buffer_mib_of,
    product_of,
)

# DeepSeek-V3, 256 experts over 64 ranks, 32 tokens a rank.
EXCHANGE = ExpertExchange(
    product="A3",
    ep_size=64,
    num_experts=256,
    num_experts_per_tok=8,
    hidden_size=7168,
    max_tokens=32,
)


def test_the_buffer_of_an_a3_group_follows_the_formula() -> None:
    # A row of 2 * 7168 bytes is a multiple of 512; with 64 bytes more it takes 14,848.
    dispatched = 4 * 32 * 64 * 14_848
    combined = (8 + 1) * 32 * 14_336  # with the shared expert that dispatch counts by default
    assert EXCHANGE.buffer_bytes == 2 * (dispatched + combined)
    assert EXCHANGE.buffer_mib == -(-EXCHANGE.buffer_bytes // MIB) == 240


def test_the_buffer_of_an_a2_group_follows_the_formula() -> None:
    exchange = replace(EXCHANGE, product="A2")
    assert exchange.buffer_bytes == 2 * (32 * 64 * 4 * 7168 * 2 + 2 * MIB)


def test_rows_are_bounded_by_experts_and_by_choices() -> None:
    assert EXCHANGE.num_rows == 32 * 64 * 4
    assert replace(EXCHANGE, ep_size=16).num_rows == 32 * 16 * 8


def test_a_default_buffer_that_is_too_small_is_refused_with_both_numbers() -> None:
    EXCHANGE.check(240)
    with pytest.raises(ValueError, match=r"HCCL_BUFFSIZE is 200 MiB, .* needs 240"):
        EXCHANGE.check(DEFAULT_BUFFER_MIB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"product": "A2", "ep_size": 12, "num_experts": 240}, "ep_size is 12, A2 takes"),
        ({"ep_size": 1, "num_experts": 256}, "ep_size is 1, A3 takes 2 to 768"),
        ({"num_experts": 250}, "num_experts is 250, must be a multiple of ep_size 64 up to 1024"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok is 17, the limit is 16"),
        ({"max_tokens": 513}, "a rank dispatches 513 tokens, A3 takes 1 to 512"),
        ({"hidden_size": 512}, "hidden_size is 512, A3 takes multiples of 32 from 1024 to 8192"),
    ],
)
def test_sizes_that_the_operators_do_not_take_are_named(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(EXCHANGE, **changes).check()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "product"),
    [("Ascend910B1", "A2"), ("Ascend910_9391", "A3"), ("Ascend310P3", None), ("", None)],
)
def test_a_device_tells_its_generation_by_its_name(name: str, product: str | None) -> None:
    assert product_of(name) == product


def test_the_buffer_is_the_environments_or_the_default() -> None:
    assert buffer_mib_of({}) == DEFAULT_BUFFER_MIB
    assert buffer_mib_of({"HCCL_BUFFSIZE": "512"}) == 512
    for text in ("0", "1G", "-5", ""):
        with pytest.raises(ValueError, match=r"HCCL_BUFFSIZE is .*, must be a number of MiB"):
            buffer_mib_of({"HCCL_BUFFSIZE": text})
