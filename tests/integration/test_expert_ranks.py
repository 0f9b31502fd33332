"""Experts dealt out over the ranks of a decoder, and moved between them while it serves."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.parallel_config import EplbConfig, ParallelConfig
from tests.integration.families import assert_greedy, write_family
from tests.integration.service import Service, wait_until

pytestmark = pytest.mark.multiprocess

_NUM_TOKENS = 40


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("experts")
    return folder, write_family(folder, tiny_model, "qwen3-moe")


async def test_experts_that_move_and_layers_that_come_while_serving_change_no_token(
    model: tuple[Path, Any],
) -> None:
    folder, hf = model
    eplb = EplbConfig(mode="dynamic", num_redundant_experts=4, interval_steps=8)
    parallel = ParallelConfig(dp_size=2, ep_size=2, eplb=eplb, layer_sharding=("o_proj",))
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, hf.config.vocab_size, (n,), generator=generator).tolist()
        for n in (1, 33, 200)
    ]
    with Service(folder, decoder={"parallel": parallel}) as service:

        def generate(prompt: list[int]) -> list[int]:
            return service.generate(prompt, max_tokens=_NUM_TOKENS, ignore_eos=True)

        outputs = await asyncio.gather(*(asyncio.to_thread(generate, p) for p in prompts))
        (decoder,) = service.of_role("decoder")
        stats = wait_until(
            lambda: (s := decoder.stats()).num_moved_experts and s, 5, "experts have moved"
        )
        assert stats.expert_imbalance >= 1
        # Two layers over two ranks: one is held, and there are two buffers.
        o_proj_bytes = 4 * hf.config.hidden_size**2
        assert stats.num_saved_bytes == pytest.approx(-o_proj_bytes, rel=0.05)
        service.assert_idle()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == _NUM_TOKENS
        assert_greedy(hf, prompt, output)
