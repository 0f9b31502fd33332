"""What one process computes: the oracle of services with several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.colocated import ColocatedEngine
from engine.request import Request, SamplingParams
from engine.scheduler import SchedulerConfig
from kernels.ops import select_ops
from tests.engine.steps import load


def tokens_alone(
    folder: Path, asked: Sequence[tuple[Sequence[int], SamplingParams]], **options: Any
) -> list[list[int]]:
    """Output tokens of (prompt, sampling) pairs; `options` go to the engine."""
    ops = select_ops("auto")
    engine = ColocatedEngine(
        load(folder, ops),
        ops,
        num_blocks=128,
        block_size=32,
        scheduler_config=SchedulerConfig(max_model_len=1024),
        **options,
    )
    requests = [
        Request(f"{i}", 0, list(prompt), len(prompt), sampling)
        for i, (prompt, sampling) in enumerate(asked)
    ]
    engine.generate(requests)
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


def greedy_alone(
    folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int, **options: Any
) -> list[list[int]]:
    """Greedy tokens, past any EOS."""
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return tokens_alone(folder, [(prompt, sampling) for prompt in prompts], **options)
