"""The tokens that come out of the whole service are those of transformers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.integration.service import Service
from tests.oracle import assert_hf_greedy, story

pytestmark = pytest.mark.multiprocess

_LENGTHS = (1, 31, 32, 33, 500, 64, 65, 100, 200)
_NUM_TOKENS = 64
_TINY = {"num_blocks": 20, "max_num_batched_tokens": 64}
_Outputs = list[list[int]]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    short = [story(_LENGTHS[i % len(_LENGTHS)], seed=i) for i in range(20)]
    return [*short, story(3000, seed=99)]


def _tokens(service: Service, prompt: list[int]) -> list[int]:
    return service.generate(prompt, max_tokens=_NUM_TOKENS, ignore_eos=True)


async def _all_tokens(service: Service, prompts: list[list[int]]) -> _Outputs:
    return list(await asyncio.gather(*(asyncio.to_thread(_tokens, service, p) for p in prompts)))


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], packaged_model: Path) -> _Outputs:
    """Tokens of the service over Mooncake, checked against transformers one by one."""
    with Service(packaged_model, worker={"transfer": {"transport": "mooncake"}}) as service:
        outputs = asyncio.run(_all_tokens(service, prompts))
        cached = asyncio.run(_all_tokens(service, prompts))
        alone = [_tokens(service, prompt) for prompt in prompts[:5]]
        service.assert_idle()
        (prefiller,) = service.of_role("prefiller")
        (peer,) = prefiller.stats().transfers
        assert peer.transport == "mooncake"
        assert peer.num_transfers >= len(prompts)
        (decoder,) = service.of_role("decoder")
        assert decoder.stats().num_graph_replays > _NUM_TOKENS
        assert decoder.stats().num_graph_recompiles == 0
    assert cached == outputs, "a warm prefix cache changed tokens"
    assert alone == outputs[:5], "batching changed tokens"
    return outputs


@pytest.mark.timeout(600)
def test_disaggregated_tokens_equal_transformers(
    prompts: list[list[int]], expected: _Outputs
) -> None:
    for prompt, output in zip(prompts, expected, strict=True):
        assert_hf_greedy(prompt, output)


@pytest.mark.parametrize(
    "worker",
    [
        pytest.param(
            {"transfer": {"transport": "memory"}, "graph_mode": "eager"}, id="memory, eager"
        ),
        pytest.param({"async_scheduling": "on"}, id="steps ahead"),
    ],
)
async def test_tokens_are_the_same_by_any_way_and_in_a_tiny_pool(
    packaged_model: Path,
    prompts: list[list[int]],
    expected: _Outputs,
    worker: dict[str, Any],
) -> None:
    few = [i for i, prompt in enumerate(prompts) if len(prompt) <= 200]
    with Service(packaged_model, worker=_TINY | worker) as service:
        outputs = await _all_tokens(service, [prompts[i] for i in few])
        (decoder,) = service.of_role("decoder")
        assert decoder.stats().num_preemptions > 0
        if "async_scheduling" in worker:
            assert decoder.stats().num_ahead_steps > _NUM_TOKENS
        service.assert_idle()
    assert outputs == [expected[i] for i in few]
