"""Workers die, clients leave, pools are tiny: no stream is hurt and nothing stays held."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.service import Service, wait_until
from tests.integration.streams import counter, greedy, prompt_of, stream_text

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[Service]:
    with Service(
        tiny_model,
        prefillers=2,
        decoders=2,
        worker={"max_num_batched_tokens": 64, "kv_cache_bytes": 8 << 20},
        decoder={"max_num_batched_tokens": 128},
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _whole_and_idle(service: Service) -> Iterator[None]:
    yield
    for worker in list(service.workers):
        if not worker.alive:
            service.restart(worker)
    service.wait_ready()
    service.assert_idle()
    status = wait_until(
        lambda: (s := service.status())["num_inflight_requests"] == 0 and s, 5, "proxy idle"
    )
    assert status["num_inflight_requests"] == 0


def _client(service: Service) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=200)
    return httpx.AsyncClient(base_url=service.url, timeout=120, limits=limits)


async def test_killing_a_prefiller_under_load_hurts_no_client(service: Service) -> None:
    bodies = [greedy(prompt_of(600, seed), 16) for seed in range(24)]
    async with _client(service) as client:
        expected = [await stream_text(client, body) for body in bodies[:6]]
        again = [greedy(prompt_of(600, 100 + seed), 16) for seed in range(18)]
        tasks = [asyncio.create_task(stream_text(client, body)) for body in bodies[:6] + again]
        await asyncio.sleep(0.15)
        await asyncio.to_thread(service.of_role("prefiller")[0].kill)
        texts = await asyncio.gather(*tasks)
        assert texts[:6] == expected
        await asyncio.to_thread(service.restart, service.of_role("prefiller")[0])
        assert [await stream_text(client, body) for body in again] == texts[6:]


async def test_a_killed_prefiller_serves_again_after_its_restart(service: Service) -> None:
    victim = service.of_role("prefiller")[0]
    await asyncio.to_thread(victim.kill)
    fresh = await asyncio.to_thread(service.restart, victim)
    async with _client(service) as client:

        async def served() -> bool:
            seeds = [random.randrange(1 << 30) for _ in range(20)]
            bodies = [greedy(prompt_of(300, seed), 4) for seed in seeds]
            await asyncio.gather(*(stream_text(client, body) for body in bodies))
            return fresh.stats().num_prompt_tokens > 0

        deadline = time.monotonic() + 20
        while not await served():
            assert time.monotonic() < deadline, "the restarted prefiller got no request"


async def test_without_prefillers_the_decoder_prefills(service: Service) -> None:
    body = greedy(prompt_of(400, 1), 12)
    async with _client(service) as client:
        expected = await stream_text(client, body)
        for worker in service.of_role("prefiller"):
            await asyncio.to_thread(worker.kill)
        service.publish()
        assert await stream_text(client, greedy(prompt_of(400, 1), 12)) == expected
        fresh = await stream_text(client, greedy(prompt_of(401, 2), 12))
        for worker in list(service.workers):
            if not worker.alive:
                await asyncio.to_thread(service.restart, worker)
        assert await stream_text(client, greedy(prompt_of(401, 2), 12)) == fresh


async def test_killing_a_decoder_moves_its_streams_without_a_changed_token(
    service: Service,
) -> None:
    bodies = [greedy(prompt_of(200, 500 + seed), 150) for seed in range(12)]
    async with _client(service) as client:
        expected = list(await asyncio.gather(*(stream_text(client, body) for body in bodies)))
        migrated = counter(service, "pdserve_migrations_total", result="success")
        begun = asyncio.Event()
        tasks = [asyncio.create_task(stream_text(client, body, begun)) for body in bodies]
        await asyncio.wait_for(begun.wait(), 20)
        victim = max(service.of_role("decoder"), key=lambda w: w.stats().num_running)
        await asyncio.to_thread(victim.kill)
        assert list(await asyncio.gather(*tasks)) == expected
        assert counter(service, "pdserve_migrations_total", result="success") > migrated


async def test_the_last_decoders_death_is_one_error_event(service: Service) -> None:
    body = {**greedy(prompt_of(100, 900), 2000), "stream": True}
    events = []
    async with _client(service) as client, client.stream("POST", "/v1/completions", json=body) as r:
        async for line in r.aiter_lines():
            if not line.startswith("data: "):
                continue
            events.append(line[6:])
            if len(events) == 5:
                for worker in service.of_role("decoder"):
                    await asyncio.to_thread(worker.kill)
                service.publish()
    assert "[DONE]" not in events
    errors = [e for e in map(json.loads, events) if "error" in e]
    assert len(errors) == 1
    assert json.loads(events[-1]) == errors[0]


async def test_500_requests_a_third_cancelled_leave_nothing_behind(service: Service) -> None:
    generator = random.Random(11)
    gate = asyncio.Semaphore(64)
    outcomes = {"done": 0, "cancelled": 0}

    async def one(client: httpx.AsyncClient, index: int) -> None:
        lengths = (5, 33, 200, 900, 1500)
        body = greedy(prompt_of(lengths[index % 5], 2000 + index), 1 + index % 40)
        cancel_after_s = generator.choice((0.0, 0.01, 0.05, 0.2, 0.6, 1.5))
        async with gate:
            request = asyncio.create_task(stream_text(client, body))
            if index % 3:
                await request
                outcomes["done"] += 1
                return
            done, _ = await asyncio.wait([request], timeout=cancel_after_s)
            if not done:
                request.cancel()
                outcomes["cancelled"] += 1
            await asyncio.gather(request, return_exceptions=True)

    async with _client(service) as client:
        await asyncio.gather(*(one(client, index) for index in range(500)))
    assert outcomes["done"] >= 333
    assert outcomes["cancelled"] >= 100
    service.assert_idle()


async def test_a_frozen_prefiller_is_left_and_the_request_goes_on(service: Service) -> None:
    async with _client(service) as client:
        expected = await stream_text(client, greedy(prompt_of(1500, 77), 8))
        for worker in service.of_role("prefiller"):
            worker.pause()
        try:
            task = asyncio.create_task(stream_text(client, greedy(prompt_of(1501, 78), 8)))
            other = asyncio.create_task(stream_text(client, greedy(prompt_of(1500, 77), 8)))
            assert await other == expected
            await task
        finally:
            for worker in service.of_role("prefiller"):
                worker.resume()
