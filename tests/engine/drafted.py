"""Requests whose tokens are drafted, and what came of them."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from engine.colocated import ColocatedEngine
from engine.models import CausalLM
from engine.request import Request
from engine.scheduler import Scheduler, SchedulerConfig
from engine.speculation import ComputedRows, Drafter
from kernels.ops import Ops
from tests.engine.steps import make_request, random_token_ids

NUM_DRAFTS = 3
CONFIG = SchedulerConfig(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, num_draft_tokens=NUM_DRAFTS
)
PROMPTS = [random_token_ids(n, seed=n) for n in (1, 7, 8, 40)]


def requests_with(**sampling: Any) -> list[Request]:
    defaults = {"max_tokens": 32}
    return [
        make_request(prompt, **(defaults | sampling), seed=seed)
        for seed, prompt in enumerate(PROMPTS)
    ]


def outputs_of(requests: Sequence[Request]) -> dict[int, list[int]]:
    return {r.sampling.seed: r.token_ids[r.num_prompt_tokens :] for r in requests}


class OftenRight:
    """Knows the outputs, and puts a wrong token at random places."""

    def __init__(self, scheduler: Scheduler, outputs: dict[int, list[int]]) -> None:
        self._scheduler = scheduler
        self._outputs = outputs
        self._random = random.Random(0)

    def propose(self, computed: Sequence[ComputedRows], hidden: Tensor, on_layer: object) -> None:
        assert len(hidden) >= sum(rows.num_rows for rows in computed)
        for rows in computed:
            request = rows.request
            known = self._outputs[request.sampling.seed][request.num_output_tokens :]
            drafts = [t if self._random.random() < 0.7 else (t + 1) % 96 for t in known]
            # More than asked for: the scheduler cuts them.
            request.draft_token_ids = drafts[: NUM_DRAFTS + 2]


def engine_with(
    model: CausalLM,
    ops: Ops,
    make_drafter: Callable[[ColocatedEngine], Drafter] | None = None,
    num_blocks: int = 40,
    config: SchedulerConfig = CONFIG,
) -> ColocatedEngine:
    return ColocatedEngine(
        model,
        ops,
        num_blocks=num_blocks,
        block_size=8,
        scheduler_config=config,
        make_drafter=make_drafter,
    )
