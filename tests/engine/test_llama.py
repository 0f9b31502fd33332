from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.ops import Ops
from tests.engine.family_configs import LLAMA_CONFIGS
from tests.engine.hf_comparison import (
    LENGTHS,
    assert_close_to_hf,
    chunks_of_five,
    prefill_then_decode,
    token_by_token,
    uneven,
    whole,
)
from tests.engine.tiny import from_hf, tiny_hf_llama


@pytest.mark.parametrize("options", LLAMA_CONFIGS.values(), ids=LLAMA_CONFIGS.keys())
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
