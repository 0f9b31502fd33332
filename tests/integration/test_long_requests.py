"""Requests that are longer than a prefiller's KV cache, and not than a decoder's."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.alone import greedy_alone
from tests.integration.service import Service, Worker
from tests.integration.streams import counter, greedy, prompt_of, stream_text

pytestmark = pytest.mark.multiprocess

_BLOCK_SIZE = 32
_PREFILLER_TOKENS = 2 * _BLOCK_SIZE
_DECODER_TOKENS = 20 * _BLOCK_SIZE


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[Service]:
    with Service(
        tiny_model,
        decoders=2,
        prefiller={"num_blocks": _PREFILLER_TOKENS // _BLOCK_SIZE},
        decoder={"num_blocks": _DECODER_TOKENS // _BLOCK_SIZE},
    ) as running:
        yield running
        running.assert_idle()


def num_prefilled(service: Service) -> int:
    """Tokens that the prefiller has computed."""
    return service.of_role("prefiller")[0].stats().num_computed_tokens


def test_a_prompt_that_no_prefiller_holds_is_computed_by_the_decoder(
    service: Service, tiny_model: Path
) -> None:
    (model,) = httpx.get(f"{service.url}/v1/models").json()["data"]
    assert model["max_model_len"] == _DECODER_TOKENS
    before = num_prefilled(service)
    for num_tokens in (_PREFILLER_TOKENS, _DECODER_TOKENS - 8):
        prompt = prompt_of(num_tokens, num_tokens)
        tokens = service.generate(prompt, max_tokens=8, ignore_eos=True)
        assert [tokens] == greedy_alone(tiny_model, [prompt], 8)
    assert num_prefilled(service) == before
    reason = {"path": "local", "reason": "too_long"}
    assert counter(service, "pdserve_disagg_decisions_total", **reason) == 2
    service.generate(prompt_of(_PREFILLER_TOKENS - 1, 7), max_tokens=8, ignore_eos=True)
    assert num_prefilled(service) == before + _PREFILLER_TOKENS - 1


async def test_a_stream_that_outgrew_the_prefiller_survives_its_decoder(
    service: Service, tiny_model: Path
) -> None:
    prompt = prompt_of(20, 1)
    body = {**greedy(prompt, 600), "skip_special_tokens": False}
    (expected,) = greedy_alone(tiny_model, [prompt], 600)
    first, second = service.of_role("decoder")
    before = {worker.engine_id: worker.stats().num_generated_tokens for worker in (first, second)}

    def num_new(worker: Worker) -> int:
        return worker.stats().num_generated_tokens - before[worker.engine_id]

    async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
        request = asyncio.create_task(stream_text(client, body))
        while (most := max(num_new(first), num_new(second))) < _PREFILLER_TOKENS:
            assert not request.done()
            await asyncio.sleep(0.01)
        assert most < 500
        victim = first if num_new(first) else second
        await asyncio.to_thread(victim.kill)
        text = await request
    reply = httpx.post(f"{service.url}/detokenize", json={"tokens": expected}, timeout=10)
    assert text == reply.json()["prompt"]
    assert counter(service, "pdserve_migrations_total", result="success") == 1
