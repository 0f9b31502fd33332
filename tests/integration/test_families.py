"""Every model family gives transformers' tokens through a prefiller, a transfer and a decoder.

They are split over different numbers of ranks; the decoder has room for no more than the prompts.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from engine.parallel_config import ParallelConfig
from tests.integration.families import FAMILIES, assert_greedy, write_family
from tests.integration.service import Service

pytestmark = pytest.mark.multiprocess

_NUM_TOKENS = 96
_NUM_BLOCKS = 30  # all prompts fit, all outputs do not


# KV is cut in two for one family, and joined for the next.
_TP = {family: (1, 2) if i % 2 else (2, 1) for i, family in enumerate(FAMILIES)}


@pytest.mark.parametrize("family", FAMILIES)
async def test_disaggregated_tokens_are_those_of_transformers(
    family: str, tiny_model: Path, tmp_path: Path
) -> None:
    prefiller, decoder = ({"parallel": ParallelConfig(tp_size=size)} for size in _TP[family])
    hf = write_family(tmp_path, tiny_model, family)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, hf.config.vocab_size, (length,), generator=generator).tolist()
        for length in (33, 64, 65, 200, 330)
    ]
    with Service(
        tmp_path,
        worker={"transfer": {"transport": "memory"}},
        prefiller=prefiller,
        decoder=decoder | {"num_blocks": _NUM_BLOCKS},
    ) as service:

        def generate(prompt: list[int]) -> list[int]:
            return service.generate(prompt, max_tokens=_NUM_TOKENS, ignore_eos=True)

        async def together() -> list[list[int]]:
            return await asyncio.gather(*(asyncio.to_thread(generate, p) for p in prompts))

        outputs = await together()
        (prefiller,) = service.of_role("prefiller")
        num_transfers = sum(peer.num_transfers for peer in prefiller.stats().transfers)
        assert num_transfers == len(prompts) * _TP[family][1], "one to every rank of the decoder"
        assert await together() == outputs, "a warm prefix cache changed tokens"
        (stats,) = (worker.stats() for worker in service.of_role("decoder"))
        assert stats.num_preemptions > 0
        assert stats.prefix_cache_hits > 0
        service.assert_idle()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == _NUM_TOKENS
        assert_greedy(hf, prompt, output)
