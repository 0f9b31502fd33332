"""Logits here against those of transformers, however tokens are scheduled."""

import random
from collections.abc import Callable
from typing import Any

import torch

from engine.models import CausalLM
from tests.engine.kept_weights import assert_close_but_for_inputs
from tests.engine.tiny import PoisonedCache, hf_logits, logits_by_steps, random_token_ids

LENGTHS = (1, 7, 8, 9, 70)
LOGIT_TOLERANCE = 1e-4
"""Of logits up to 5 that both sides compute in float32, in other orders of addition.

A sum of K products, 64 to 256 here, rounds each partial sum by 2^-24 of its size at most; by chance
that adds up to some sqrt(K) 2^-25, 3e-7 of the result. Twenty products, sums of attention and norms
in a row and the same on the other side make sqrt(40) times as much, 2e-6, 1e-5 of a logit of 5.
That is what was seen: 1.2e-5 at most over all families' tests, on both backends. Eight times as
much is allowed; a single product of bfloat16 or float16 inputs would be farther off.
"""


def whole(_: int, left: int) -> int:
    return left


def chunks_of_five(_: int, left: int) -> int:
    return 5


def token_by_token(_: int, left: int) -> int:
    return 1


def prefill_then_decode(sequence: int, left: int) -> int:
    """All but three tokens at once, then one at a time: prefills and decodes mix."""
    return max(1, left - 3)


def uneven() -> Callable[[int, int], int]:
    rng = random.Random(0)
    return lambda sequence, left: rng.choice((1, 1, 2, 3, 11, 40))


def assert_close_to_hf(
    model: CausalLM,
    hf: Any,
    lengths: tuple[int, ...],
    take: Callable[[int, int], int],
    *,
    rounds_inputs: bool = False,
) -> None:
    """rounds_inputs: to 16 bits, as the CPU does where weights have 4 or 8."""
    sequences = [random_token_ids(length, seed) for seed, length in enumerate(lengths)]
    cache = PoisonedCache(model, num_blocks=40, block_size=8)
    for token_ids, logits in zip(
        sequences, logits_by_steps(model, cache, sequences, take), strict=True
    ):
        expected = hf_logits(hf, token_ids)
        assert expected.abs().max() > 1, "the comparison means nothing on logits near zero"
        # NaN from a block that is not the sequence's own would fail here too.
        if rounds_inputs:
            assert_close_but_for_inputs(logits, expected)
        else:
            torch.testing.assert_close(logits, expected, rtol=0, atol=LOGIT_TOLERANCE)


def prefill_then_32_steps(_: int, left: int) -> int:
    return max(1, left - 32)
