"""Drafts change how fast tokens come, not which: whatever is drafted, however often it is right."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models import CausalLM
from engine.ngram import NgramDrafter, find_continuation
from engine.request import FinishReason
from engine.scheduler import SchedulerConfig
from engine.speculation import ComputedRows
from kernels.ops import Ops, select_ops
from tests.engine.drafted import (
    CONFIG,
    NUM_DRAFTS,
    OftenRight,
    engine_with,
    outputs_of,
    requests_with,
)
from tests.engine.steps import make_request, random_token_ids
from tests.engine.tiny import from_hf, tiny_hf_llama

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.95},
    "penalties": {"temperature": 0.7, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    "ends by a token": {"temperature": 1.0, "min_tokens": 4, "stop_token_ids": frozenset({5, 6})},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
}


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops("auto")


@pytest.fixture(scope="module")
def model(ops: Ops, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return from_hf(tiny_hf_llama(), tmp_path_factory.mktemp("llama"), ops)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("num_blocks", [40, 12], ids=["room", "preemption"])
def test_tokens_are_those_without_drafts(
    options: dict[str, Any], num_blocks: int, model: CausalLM, ops: Ops
) -> None:
    plain = requests_with(**options)
    engine_with(model, ops).generate(plain)
    expected = outputs_of(plain)

    drafted = requests_with(**options)
    speculative = engine_with(
        model, ops, lambda made: OftenRight(made.scheduler, expected), num_blocks=num_blocks
    )
    speculative.generate(drafted)
    assert outputs_of(drafted) == expected
    assert [r.finish_reason for r in drafted] == [r.finish_reason for r in plain]
    counters = speculative.drafts
    if options.get("max_tokens", 32) > 2:
        assert 0 < counters.num_accepted < counters.num_drafts
        assert counters.num_drafts <= NUM_DRAFTS * counters.num_steps
    if num_blocks == 12 and options.get("max_tokens", 32) > 2 and "min_tokens" not in options:
        assert speculative.scheduler.num_preemptions > 0
    speculative.block_manager.check_integrity([])


def test_drafts_end_at_the_longest_context(model: CausalLM, ops: Ops) -> None:
    config = replace(CONFIG, max_model_len=50)
    plain = requests_with(max_tokens=100, ignore_eos=True)
    engine_with(model, ops, config=config).generate(plain)
    drafted = requests_with(max_tokens=100, ignore_eos=True)
    expected = outputs_of(plain)
    engine_with(
        model, ops, lambda made: OftenRight(made.scheduler, expected), config=config
    ).generate(drafted)
    assert outputs_of(drafted) == expected
    assert all(r.finish_reason is FinishReason.LENGTH for r in drafted)
    assert [r.num_tokens for r in drafted] == [50] * len(drafted)


def test_repetition_is_found_without_a_model(model: CausalLM, ops: Ops) -> None:
    prompt = random_token_ids(6, seed=1) * 4
    plain, drafted = (make_request(prompt, max_tokens=120) for _ in range(2))
    engine_with(model, ops).generate([plain])
    speculative = engine_with(model, ops, lambda made: NgramDrafter(made.scheduler))
    speculative.generate([drafted])
    assert drafted.token_ids == plain.token_ids
    # A tiny greedy model ends in a loop.
    assert speculative.drafts.num_accepted > 20


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], [4, 1, 2]),
        ([7, 1, 2, 9, 1, 2, 5, 1, 2], [5, 1, 2]),  # the latest place
        ([1, 2, 3, 8, 2, 3, 9, 1, 2, 3], [8, 2, 3]),  # the longest n-gram goes first
        ([5, 5, 5], [5]),
        ([1, 2, 3], []),
        ([1], []),
        ([256, 0, 1, 256, 1], []),  # bytes that match across tokens do not count
    ],
)
def test_a_continuation_follows_the_latest_longest_match(
    token_ids: list[int], expected: list[int]
) -> None:
    assert find_continuation(token_ids, 3) == expected


class AlwaysTheSame:
    """One draft, right about one time in a few."""

    def propose(self, computed: Sequence[ComputedRows], hidden: Tensor, on_layer: object) -> None:
        for rows in computed:
            rows.request.draft_token_ids = [3, 1]


def test_the_sampled_distribution_is_the_models(ops: Ops, tmp_path: Path) -> None:
    """Chi-square over all pairs of the second and third token, given the first.

    These are the ones that drafts decide about. 8 tokens, 63 degrees of freedom: a right sampler
    exceeds 103.4 once in a thousand runs, and seeds are fixed.
    """
    hf = tiny_hf_llama(vocab_size=8, eos_token_id=None)
    model = from_hf(hf, tmp_path, ops)
    config = SchedulerConfig(
        max_num_seqs=64, max_num_batched_tokens=256, max_model_len=16, num_draft_tokens=2
    )
    speculative = engine_with(
        model, ops, lambda made: AlwaysTheSame(), num_blocks=200, config=config
    )
    prompt, temperature = [4, 6], 2.0
    count = 4000
    requests = []
    for seed in range(count):
        request = make_request(prompt, temperature=temperature, seed=seed, max_tokens=3)
        request.request_id = str(seed)
        requests.append(request)
    for start in range(0, count, 500):
        speculative.generate(requests[start : start + 500])
    assert 0.02 < speculative.drafts.num_accepted / speculative.drafts.num_drafts < 0.5

    with torch.inference_mode():
        triples = torch.cartesian_prod(*[torch.arange(8)] * 3)
        ids = torch.cat([torch.tensor(prompt).expand(512, -1), triples], dim=1)
        logprobs = (hf(ids).logits / temperature).log_softmax(-1)
    chances = sum(logprobs[torch.arange(512), 1 + i, triples[:, i]] for i in range(3)).exp()
    expected = count * chances.view(8, 8, 8).sum(0).flatten()
    seen = Counter(tuple(r.token_ids[3:]) for r in requests)
    observed = torch.tensor([seen[a, b] for a in range(8) for b in range(8)])
    assert expected.min() > 5
    assert ((observed - expected) ** 2 / expected).sum() < 103.4
