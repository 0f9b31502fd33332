"""Logits of every family after its KV moved to another cache, with blocks of another size."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.kv_layout import kv_layout
from engine.models import CausalLM
from engine.request import Request
from kernels.ops import Ops
from kvtransfer.reshard import plan_transfer
from tests.engine.family_configs import (
    DEEPSEEK_CONFIGS,
    LLAMA_CONFIGS,
    MOE_CONFIGS,
    QWEN_CONFIGS,
    WINDOW_CONFIGS,
)
from tests.engine.hf_comparison import token_by_token, whole
from tests.engine.steps import PoisonedCache, logits_of_requests, make_request, random_token_ids
from tests.engine.tiny import from_hf, hf_logits, tiny_hf_llama
from tests.engine.tiny_families import FAMILIES, tiny_deepseek, tiny_family

NUM_STEPS = 32
PROMPT_LENGTHS = (1, 15, 16, 17, 60)


def move(model: CausalLM, source: PoisonedCache, target: PoisonedCache, old: Request) -> Request:
    """A request with the same tokens whose KV so far was copied as a transfer would."""
    new = make_request(old.token_ids)
    target.allocate(new)
    layouts = [kv_layout(model.config, cache.block_size) for cache in (source, target)]
    plan = plan_transfer(*layouts, old.block_ids, new.block_ids, old.num_computed_tokens)
    pairs = ((source.k_caches, target.k_caches), (source.v_caches, target.v_caches))
    for moves, (from_caches, to_caches) in zip(plan.moves, pairs, strict=True):
        for from_cache, to_cache in zip(from_caches, to_caches, strict=True):
            read, write = (cache.view(torch.uint8).flatten() for cache in (from_cache, to_cache))
            for start, to, count in moves:
                write[to : to + count] = read[start : start + count]
    new.num_computed_tokens = old.num_computed_tokens
    return new


def expected_steps(hf: PreTrainedModel, token_ids: list[int]) -> Tensor:
    return hf_logits(hf, token_ids)[-NUM_STEPS:]


# Everything that prefill and decoding are compared in: too much for every run.
ALL_CONFIGS: dict[str, Callable[[], PreTrainedModel]] = {
    **{f"llama, {k}": partial(tiny_hf_llama, **v) for k, v in LLAMA_CONFIGS.items()},
    **{k: partial(tiny_family, f, **v) for k, (f, v) in (QWEN_CONFIGS | WINDOW_CONFIGS).items()},
    **{f"qwen3-moe, {k}": partial(tiny_family, "qwen3-moe", **v) for k, v in MOE_CONFIGS.items()},
    **{k: partial(tiny_deepseek, f, **v) for k, (f, v) in DEEPSEEK_CONFIGS.items()},
}


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(make, id=name) for name, make in FAMILIES.items()),
        *(pytest.param(m, id=n, marks=pytest.mark.slow) for n, m in ALL_CONFIGS.items()),
    ],
)
def test_32_steps_after_a_transfer_have_the_logits_of_transformers(
    make: Callable[[], PreTrainedModel], ops: Ops, tmp_path: Path
) -> None:
    hf = make()
    model = from_hf(hf, tmp_path, ops)
    source = PoisonedCache(model, num_blocks=40, block_size=8, seed=1)
    target = PoisonedCache(model, num_blocks=40, block_size=16, seed=2)
    sequences = [random_token_ids(n + NUM_STEPS, seed) for seed, n in enumerate(PROMPT_LENGTHS)]
    requests = [make_request(token_ids[:-NUM_STEPS]) for token_ids in sequences]
    for request in requests:
        source.allocate(request)
    logits_of_requests(model, source, requests, whole)
    for request, token_ids in zip(requests, sequences, strict=True):
        request.token_ids = token_ids
    moved = [move(model, source, target, request) for request in requests]
    logits = logits_of_requests(model, target, moved, token_by_token)
    for token_ids, steps in zip(sequences, logits, strict=True):
        torch.testing.assert_close(steps, expected_steps(hf, token_ids), rtol=0, atol=1e-3)
