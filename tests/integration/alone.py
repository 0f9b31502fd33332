"""What one process computes: the oracle of services with several."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.colocated import ColocatedEngine
from engine.config import Quantization
from engine.request import Request, SamplingParams
from engine.scheduler import SchedulerConfig
from kernels.cpu.options import DEFAULT_OPTIONS, CpuOptions
from kernels.ops import select_ops
from tests.engine.steps import load
from tests.integration.service import Service


def tokens_alone(
    folder: Path,
    asked: Sequence[tuple[Sequence[int], SamplingParams]],
    *,
    quantization: Quantization = "none",
    cpu: CpuOptions = DEFAULT_OPTIONS,
    **options: Any,
) -> list[list[int]]:
    """Output tokens of (prompt, sampling) pairs; `options` go to the engine."""
    ops = select_ops("auto", cpu=cpu)
    engine = ColocatedEngine(
        load(folder, ops, quantization=quantization),
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


def assert_prompt_logprobs(service: Service, folder: Path, prompt: list[int]) -> None:
    """The service's for a prompt are those of transformers' Llama, row by row."""
    options = {"echo": True, "logprobs": 1, "max_tokens": 1, "ignore_eos": True}
    found = service.complete(prompt, **options)["choices"][0]["logprobs"]["token_logprobs"]
    token_ids = torch.tensor(prompt)
    with torch.inference_mode():
        logits = LlamaForCausalLM.from_pretrained(folder)(token_ids[None]).logits[0]
    logprobs = logits.log_softmax(dim=-1)[:-1].gather(1, token_ids[1:, None])[:, 0]
    assert found[1:-1] == pytest.approx(logprobs.tolist(), abs=1e-3)
