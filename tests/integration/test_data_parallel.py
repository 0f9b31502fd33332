"""Data-parallel engines in the service, experts over all their ranks: the tokens of one process."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from engine.colocated import ColocatedEngine
from engine.parallel_config import ParallelConfig
from engine.request import Request, SamplingParams
from engine.scheduler import SchedulerConfig
from kernels.ops import select_ops
from tests.engine.steps import load
from tests.engine.tiny import tiny_hf
from tests.integration.service import Service

pytestmark = pytest.mark.multiprocess

_NUM_TOKENS = 24
_PROMPTS = [[3 + (7 * i + n * i * i) % 290 for i in range(n)] for n in (1, 5, 31, 64, 200, 700)]


def write_tiny_experts(folder: Path, tokenizer_folder: Path) -> Path:
    """A random Qwen3-MoE of 8 experts, with the tokenizer of another model."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder / name)
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    tiny_hf(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        vocab_size=vocab_size,
        max_position_embeddings=1024,
        eos_token_id=0,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def experts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_experts(tmp_path_factory.mktemp("tiny-experts"), tiny_model)


def greedy_alone(
    folder: Path, prompts: list[list[int]], num_tokens: int = _NUM_TOKENS
) -> list[list[int]]:
    """Greedy tokens of one process."""
    ops = select_ops("auto")
    engine = ColocatedEngine(
        load(folder, ops),
        ops,
        num_blocks=128,
        block_size=32,
        scheduler_config=SchedulerConfig(max_model_len=1024),
    )
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    requests = [Request(f"{i}", 0, list(p), len(p), sampling) for i, p in enumerate(prompts)]
    engine.generate(requests)
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


async def _generate_all(service: Service, prompts: list[list[int]]) -> list[list[int]]:
    def generate(prompt: list[int]) -> list[int]:
        return service.generate(prompt, max_tokens=_NUM_TOKENS, ignore_eos=True)

    return list(await asyncio.gather(*(asyncio.to_thread(generate, p) for p in prompts)))


def _over(**sizes: Any) -> dict[str, ParallelConfig]:
    return {"parallel": ParallelConfig(**{f"{name}_size": n for name, n in sizes.items()})}


async def test_tokens_of_data_parallel_roles_that_differ_are_those_of_one_process(
    experts: Path,
) -> None:
    expected = greedy_alone(experts, _PROMPTS)
    with Service(
        experts,
        prefiller=_over(tp=2),
        decoder=_over(dp=2, tp=2, ep=4),
        proxy={"local_prefill_tokens": 8},
    ) as service:
        (decoder,) = service.of_role("decoder")
        # Alone: the other data-parallel rank has dummy rows, in every step.
        assert (await _generate_all(service, _PROMPTS[3:4])) == expected[3:4]
        idle = decoder.stats()
        assert [p.num_dummy_steps for p in idle.pools] == [0, idle.num_steps]
        assert (await _generate_all(service, _PROMPTS)) == expected
        both = decoder.stats()
        assert all(p.num_dummy_steps < both.num_steps for p in both.pools), "one did nothing"
        assert {c.rank for c in both.collectives if c.kind == "ep.all_to_all"} == {0, 1, 2, 3}
        service.assert_idle()
        quiet = decoder.stats()
        await asyncio.sleep(1.0)
        assert decoder.stats().num_steps == quiet.num_steps, "it steps with nothing to do"
        metrics = service.metrics()
        assert "pdserve_collective_calls_total{" in metrics
