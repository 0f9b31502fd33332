"""The tokens that come out of the whole service are those of one process."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.service import Service
from tests.oracle import hf_greedy

pytestmark = pytest.mark.multiprocess

_LENGTHS = (1, 31, 32, 33, 64, 100, 500)
_NUM_TOKENS = 64


def _prompts(count: int, lengths: tuple[int, ...] = _LENGTHS) -> list[list[int]]:
    """Varied text-like prompts of the packaged model: random walks over common tokens."""
    generator = random.Random(5)
    return [
        [generator.randrange(200, 20_000) for _ in range(lengths[i % len(lengths)])]
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return _prompts(21)


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return [hf_greedy(prompt, _NUM_TOKENS) for prompt in prompts]


def _tokens(service: Service, prompt: list[int]) -> list[int]:
    reply = service.complete(prompt, max_tokens=_NUM_TOKENS, ignore_eos=True, return_token_ids=True)
    return reply["choices"][0]["token_ids"]


async def _all_tokens(service: Service, prompts: list[list[int]]) -> list[list[int]]:
    return list(await asyncio.gather(*(asyncio.to_thread(_tokens, service, p) for p in prompts)))


@pytest.fixture(scope="module", params=["mooncake", "memory"])
def service(packaged_model: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    transfer = {"transport": request.param}
    with Service(packaged_model, worker={"transfer": transfer}) as running:
        yield running


async def test_batched_service_tokens_equal_transformers(
    service: Service, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert await _all_tokens(service, prompts) == expected
    assert await _all_tokens(service, prompts) == expected, "with a warm prefix cache"
    service.assert_idle()


async def test_tokens_survive_a_pool_so_small_that_requests_are_preempted(
    packaged_model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with Service(
        packaged_model, worker={"num_blocks": 24, "max_num_batched_tokens": 64}
    ) as service:
        assert await _all_tokens(service, prompts) == expected
        (decoder,) = service.of_role("decoder")
        assert decoder.stats().num_preemptions > 0
        service.assert_idle()
