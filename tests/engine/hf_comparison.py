"""Logits here against those of transformers, however tokens are scheduled."""

import random
from collections.abc import Callable
from typing import Any

import torch

from engine.models import CausalLM
from tests.engine.tiny import PoisonedCache, hf_logits, logits_by_steps, random_token_ids

LENGTHS = (1, 7, 8, 9, 70)


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
    model: CausalLM, hf: Any, lengths: tuple[int, ...], take: Callable[[int, int], int]
) -> None:
    sequences = [random_token_ids(length, seed) for seed, length in enumerate(lengths)]
    cache = PoisonedCache(model, num_blocks=40, block_size=8)
    for token_ids, logits in zip(
        sequences, logits_by_steps(model, cache, sequences, take), strict=True
    ):
        expected = hf_logits(hf, token_ids)
        assert expected.abs().max() > 1, "the comparison means nothing on logits near zero"
        # NaN from a block that is not the sequence's own would fail here too.
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)


def prefill_then_32_steps(_: int, left: int) -> int:
    return max(1, left - 32)
