import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import CausalLM
from kernels.ops import Ops
from tests.engine.tiny import (
    PoisonedCache,
    from_hf,
    hf_logits,
    logits_by_steps,
    random_token_ids,
    tiny_hf_llama,
)

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "nine heads over three": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
    },
    "tied embedding": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "both biases, tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "wide theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn with its own attention factor": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 0.8,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "truncate": False,
        }
    },
    "yarn with mscale": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        }
    },
}
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


@pytest.mark.parametrize("options", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_logits_are_those_of_transformers(
    options: dict[str, Any], ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_hf_llama(**options)
    model = from_hf(hf, tmp_path, ops)
    assert_close_to_hf(model, hf, LENGTHS, whole)
    assert_close_to_hf(model, hf, LENGTHS, uneven())


@pytest.mark.parametrize("take", [whole, chunks_of_five, token_by_token, prefill_then_decode])
@pytest.mark.parametrize("lengths", [(70,), LENGTHS], ids=["alone", "batched"])
def test_logits_do_not_depend_on_how_the_tokens_are_scheduled(
    take: Callable[[int, int], int], lengths: tuple[int, ...], ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_hf_llama()
    assert_close_to_hf(from_hf(hf, tmp_path, ops), hf, lengths, take)
