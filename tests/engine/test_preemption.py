"""Greedy tokens of every family in a pool too small for its requests, with shared prefixes."""

from pathlib import Path

import pytest
import torch

from engine.colocated import ColocatedEngine
from engine.scheduler import SchedulerConfig
from kernels.ops import select_ops
from tests.engine.steps import make_request, random_token_ids
from tests.engine.tiny import from_hf, hf_logits
from tests.engine.tiny_families import FAMILIES

CONFIG = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24, max_model_len=120)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_through_preemption_and_prefix_hits(
    family: str, tmp_path: Path
) -> None:
    hf, ops = FAMILIES[family](), select_ops("auto")
    made = ColocatedEngine(
        from_hf(hf, tmp_path, ops), ops, num_blocks=20, block_size=8, scheduler_config=CONFIG
    )
    prefix = random_token_ids(24, seed=0)
    requests = [
        make_request(prefix + random_token_ids(3 + 4 * i, seed=i), max_tokens=30, ignore_eos=True)
        for i in range(5)
    ]
    made.generate(requests)
    assert made.scheduler.num_preemptions > 0
    assert made.block_manager.prefix_cache_hits > 0
    made.block_manager.check_integrity([])
    for request in requests:
        start = request.num_prompt_tokens
        logits = hf_logits(hf, request.token_ids)[start - 1 : -1]
        chosen = logits[torch.arange(30), torch.tensor(request.token_ids[start:])]
        assert (logits.amax(dim=-1) - chosen).max() < 1e-3
