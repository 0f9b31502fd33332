"""Failures of workers at every point of a request: what the client sees is undisturbed."""

import asyncio
import json
import time
from typing import Any

import pytest

from protos import worker_pb2
from proxy.tokenizer import Tokenizer
from tests.proxy.conftest import MODEL, Stand, StandFactory
from tests.proxy.fakes import FakeWorker, hashed_token

PROMPT = "The lighthouse stood at the end of the pier, and its keeper was old."
NUM_TOKENS = 12


def undisturbed(tokenizer: Tokenizer, num_tokens: int = NUM_TOKENS) -> str:
    prompt = tokenizer.encode(PROMPT)
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(hashed_token(token_ids, len(prompt), worker_pb2.SamplingParams()))
    return tokenizer.decode(token_ids[len(prompt) :])


async def complete(proxy: Stand, **options: Any) -> Any:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS, **options}
    return await proxy.http.post("/v1/completions", json=body)


async def stream(proxy: Stand, **options: Any) -> tuple[int, str, list[Any], bool]:
    """(status, text, events, whether [DONE] came)."""
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    async with proxy.http.stream("POST", "/v1/completions", json=body) as reply:
        data = (await reply.aread()).decode()
    if reply.status_code != 200:
        return reply.status_code, "", [json.loads(data)], False
    lines = [line.removeprefix("data: ") for line in data.split("\n\n") if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    text = "".join(c["text"] for event in events for c in event.get("choices", ()))
    return 200, text, events, lines[-1] == "[DONE]"


@pytest.mark.parametrize("how", ["die_at", "fail_at"])
@pytest.mark.parametrize("where", ["prefill", "first_token"])
async def test_a_failing_prefiller_is_replaced_by_another(
    stand: StandFactory, tokenizer: Tokenizer, how: str, where: str
) -> None:
    async with stand(num_prefillers=2) as proxy:
        for worker in proxy.prefillers:
            setattr(worker.behavior, how, where)
        # Only the one that is asked first fails.
        asked: list[str] = []

        async def watch() -> None:
            await proxy.until(lambda: any(w.works for w in proxy.prefillers))
            for worker in proxy.prefillers:
                if not worker.works:
                    worker.behavior.die_at = worker.behavior.fail_at = ""
                else:
                    asked.append(worker.engine_id)

        for worker in proxy.prefillers:
            worker.behavior.prefill_delay_s = 0.1
        watching = asyncio.create_task(watch())
        status, text, events, done = await stream(proxy)
        await watching
        assert (status, text, done) == (200, undisturbed(tokenizer), True)
        assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS
        assert len(asked) == 1
        served = [w for w in proxy.prefillers if w.engine_id not in asked]
        assert served[0].num_prefills == 1
        proxy.prefillers[:] = served
        await proxy.until_idle()


@pytest.mark.parametrize("where", ["prefill", "first_token"])
async def test_without_another_prefiller_the_decoder_prefills(
    stand: StandFactory, tokenizer: Tokenizer, where: str
) -> None:
    async with stand() as proxy:
        proxy.prefillers[0].behavior.die_at = where
        status, text, events, done = await stream(proxy)
        assert (status, text, done) == (200, undisturbed(tokenizer), True)
        assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS
        assert proxy.decoders[0].num_prefills == 1
        proxy.prefillers.clear()
        await proxy.until_idle()


async def test_kv_that_does_not_arrive_is_retried_then_prefilled_locally(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand(num_prefillers=2) as proxy:
        proxy.decoders[0].behavior.fail_at = "transfer"
        proxy.decoders[0].behavior.fail_code = worker_pb2.FAILURE_TRANSFER
        status, text, _, done = await stream(proxy)
        assert (status, text, done) == (200, undisturbed(tokenizer), True)
        assert sum(w.num_prefills for w in proxy.prefillers) == 2
        assert proxy.decoders[0].num_prefills == 1
        assert proxy.metric("pdserve_retries_total", reason="transfer") == 2
        await proxy.until_idle()


@pytest.mark.parametrize("how", ["die_at", "fail_at"])
@pytest.mark.parametrize("where", ["reserve", "transfer", "token:1", "token:5", "token:11"])
async def test_a_failing_decoder_is_replaced_without_a_changed_token(
    stand: StandFactory, tokenizer: Tokenizer, how: str, where: str
) -> None:
    async with stand(num_decoders=2) as proxy:
        for worker in proxy.decoders:
            worker.behavior.reserve_delay_s = 0.05
            setattr(worker.behavior, how, where)
        request = asyncio.create_task(stream(proxy, logprobs=1))
        await proxy.until(lambda: any(w.works for w in proxy.decoders))
        healthy = next(w for w in proxy.decoders if not w.works)
        healthy.behavior.die_at = healthy.behavior.fail_at = ""
        status, text, events, done = await request
        assert (status, text, done) == (200, undisturbed(tokenizer), True)
        assert events[-1]["usage"]["completion_tokens"] == NUM_TOKENS
        tokens = [t for e in events[:-1] for c in e["choices"] for t in c["logprobs"]["tokens"]]
        assert len(tokens) == NUM_TOKENS
        moved = healthy.works[-1]
        assert moved.num_prompt_tokens == len(tokenizer.encode(PROMPT))
        assert healthy.works[-1].sampling.seed == proxy.prefillers[0].works[0].sampling.seed
        if where.startswith("token"):
            assert len(moved.token_ids) == moved.num_prompt_tokens + int(where[6:])
            assert proxy.metric("pdserve_migrations_total", result="success") == 1
        proxy.decoders[:] = [healthy]
        await proxy.until_idle()


async def test_death_of_the_only_decoder_is_one_error_event_and_no_done(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy:
        proxy.decoders[0].behavior.die_at = "token:5"
        status, text, events, done = await stream(proxy)
        assert (status, done) == (200, False)
        assert text == undisturbed(tokenizer, 5)
        errors = [event["error"] for event in events if "error" in event]
        assert len(errors) == 1
        assert events[-1] == {"error": errors[0]}
        assert errors[0]["code"] == "unavailable"
        assert proxy.metric("pdserve_migrations_total", result="failed") == 1
        reply = await complete(proxy)
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1


async def test_a_unary_request_whose_decoder_dies_for_good_gets_503(stand: StandFactory) -> None:
    async with stand() as proxy:
        proxy.decoders[0].behavior.die_at = "token:5"
        reply = await complete(proxy)
        assert reply.status_code == 503
        assert reply.json()["error"]["type"] == "service_unavailable_error"


async def test_a_worker_that_calls_the_request_invalid_is_asked_once(stand: StandFactory) -> None:
    async with stand(num_prefillers=2) as proxy:
        for worker in proxy.prefillers:
            worker.behavior.fail_at = "prefill"
            worker.behavior.fail_code = worker_pb2.FAILURE_INVALID
        for is_stream in (False, True):
            reply = await complete(proxy, stream=is_stream)
            assert reply.status_code == 400
            assert reply.json()["error"]["type"] == "invalid_request_error"
        assert sum(len(w.works) for w in proxy.prefillers) == 2
        assert len(proxy.decoders[0].works) == 2
        await proxy.until_idle()


async def test_overload_that_passes_is_waited_for(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand(num_decoders=2) as proxy:
        for worker in proxy.decoders:
            worker.behavior.fail_at = "reserve"
            worker.behavior.fail_code = worker_pb2.FAILURE_OVERLOADED
            worker.behavior.num_failures = 2
        status, text, _, done = await stream(proxy)
        assert (status, text, done) == (200, undisturbed(tokenizer), True)
        assert proxy.metric("pdserve_retries_total", reason="overloaded") >= 2


async def test_overload_that_stays_is_429_in_time(stand: StandFactory) -> None:
    async with stand(queue_timeout_s=0.3) as proxy:
        proxy.decoders[0].behavior.fail_at = "reserve"
        proxy.decoders[0].behavior.fail_code = worker_pb2.FAILURE_OVERLOADED
        began = time.monotonic()
        reply = await complete(proxy)
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == "overloaded"
        assert int(reply.headers["retry-after"]) >= 1
        assert time.monotonic() - began < 3
        await proxy.until_idle()


async def test_an_overloaded_prefiller_leaves_the_work_to_the_decoder(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy:
        proxy.prefillers[0].behavior.fail_at = "prefill"
        proxy.prefillers[0].behavior.fail_code = worker_pb2.FAILURE_OVERLOADED
        status, text, _, _ = await stream(proxy)
        assert (status, text) == (200, undisturbed(tokenizer))
        assert (
            proxy.metric("pdserve_disagg_decisions_total", path="local", reason="overloaded") == 1
        )


async def test_an_idle_decoder_computes_a_prompt_that_would_wait_for_another(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand(local_prefill_tokens=16) as proxy:
        (prefiller,), (decoder,) = proxy.prefillers, proxy.decoders
        pool = proxy.server.service.pool
        prefiller.behavior.prefill_delay_s = 2.0
        long_prompt = [100 + i for i in range(300)]
        waiting = asyncio.create_task(complete(proxy, prompt=long_prompt))
        await proxy.until(lambda: any(w.num_pending_tokens for w in pool.snapshots()))
        assert (await stream(proxy, prompt=long_prompt[::-1]))[0] == 200
        assert not waiting.done()
        assert (prefiller.num_prefills, decoder.num_prefills) == (0, 1)
        reason = {"path": "local", "reason": "prefiller_busy"}
        assert proxy.metric("pdserve_disagg_decisions_total", **reason) == 1
        assert (await waiting).status_code == 200
        await proxy.until_idle()
        assert all(w.num_pending_tokens == 0 for w in pool.snapshots())


async def shorten(proxy: Stand, worker: FakeWorker, max_model_len: int) -> None:
    """Let a worker come back with room for so many tokens."""
    worker.max_model_len = max_model_len
    await worker.stop()
    await worker.start()
    proxy.controller.publish()
    pool = proxy.server.service.pool
    await proxy.until(lambda: any(w.max_model_len == max_model_len for w in pool.snapshots()))


async def test_a_prompt_goes_to_a_prefiller_that_can_hold_it(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand(num_prefillers=2) as proxy:
        small, large = proxy.prefillers
        await shorten(proxy, small, len(tokenizer.encode(PROMPT)))
        for _ in range(8):
            status, text, _, _ = await stream(proxy)
            assert (status, text) == (200, undisturbed(tokenizer))
        assert (len(small.works), large.num_prefills) == (0, 8)
        await proxy.until_idle()


async def test_what_no_prefiller_can_hold_the_decoder_prefills(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand() as proxy:
        await shorten(proxy, proxy.prefillers[0], len(tokenizer.encode(PROMPT)))
        status, text, _, done = await stream(proxy)
        assert (status, text, done) == (200, undisturbed(tokenizer), True)
        assert (proxy.prefillers[0].works, proxy.decoders[0].num_prefills) == ([], 1)
        reason = {"path": "local", "reason": "too_long"}
        assert proxy.metric("pdserve_disagg_decisions_total", **reason) == 1
        await proxy.until_idle()


async def test_a_stream_that_outgrew_the_prefillers_goes_on_at_another_decoder(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand(num_decoders=2) as proxy:
        (prefiller,) = proxy.prefillers
        await shorten(proxy, prefiller, len(tokenizer.encode(PROMPT)) + 4)
        for worker in proxy.decoders:
            worker.behavior.die_at = "token:8"
            worker.behavior.token_delay_s = 0.02
        request = asyncio.create_task(stream(proxy))
        await proxy.until(lambda: any(w.works for w in proxy.decoders))
        healthy = next(w for w in proxy.decoders if not w.works)
        healthy.behavior.die_at = ""
        status, text, _, done = await request
        assert (status, text, done) == (200, undisturbed(tokenizer), True)
        assert (prefiller.num_prefills, healthy.num_prefills) == (1, 1)
        proxy.decoders[:] = [healthy]
        await proxy.until_idle()


async def test_attempts_are_bounded(stand: StandFactory) -> None:
    async with stand(max_attempts=3) as proxy:
        proxy.decoders[0].behavior.fail_at = "transfer"
        proxy.decoders[0].behavior.fail_code = worker_pb2.FAILURE_LEASE
        status, _, events, done = await stream(proxy)
        assert (status, done) == (200, False)
        assert "3 attempts failed" in events[-1]["error"]["message"]
        assert len(proxy.decoders[0].works) == 3
        await proxy.until_idle()


async def test_a_silent_worker_is_left(stand: StandFactory, tokenizer: Tokenizer) -> None:
    async with stand(num_decoders=2, worker_silence_s=0.4) as proxy:
        for worker in proxy.decoders:
            worker.behavior.token_delay_s = 0.05
        request = asyncio.create_task(stream(proxy))
        await proxy.until(lambda: any(w.num_decode_tokens > 1 for w in proxy.decoders))
        frozen = next(w for w in proxy.decoders if w.works)
        frozen.behavior.token_delay_s = 60
        frozen.stats_interval_s = 60
        status, text, _, done = await request
        assert (status, text, done) == (200, undisturbed(tokenizer), True)


async def test_the_deadline_ends_a_request_in_every_mode(stand: StandFactory) -> None:
    async with stand(request_timeout_s=0.4) as proxy:
        proxy.prefillers[0].behavior.prefill_delay_s = 5
        unary = await complete(proxy)
        assert unary.status_code == 408
        assert unary.json()["error"]["code"] == "deadline_exceeded"
        await proxy.until_idle()
        proxy.prefillers[0].behavior.prefill_delay_s = 0
        proxy.decoders[0].behavior.token_delay_s = 0.1
        status, _, events, done = await stream(proxy, max_tokens=1000)
        assert (status, done) == (200, False)
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        await proxy.until_idle()


async def test_every_pair_of_workers_is_used(stand: StandFactory) -> None:
    async with stand(num_prefillers=2, num_decoders=2) as proxy:
        for i in range(24):
            reply = await complete(proxy, prompt=f"{i} {PROMPT}", max_tokens=2)
            assert reply.status_code == 200
        assert all(worker.works for worker in proxy.workers)


async def test_a_stream_of_many_failures_is_still_exact(
    stand: StandFactory, tokenizer: Tokenizer
) -> None:
    async with stand(num_prefillers=2, num_decoders=3, max_attempts=10) as proxy:
        for i, worker in enumerate(proxy.decoders):
            worker.behavior.fail_at = f"token:{3 + 3 * i}"
            worker.behavior.num_failures = 1
            worker.behavior.token_delay_s = 0
        texts = await asyncio.gather(*(stream(proxy, n=2) for _ in range(4)))
        for status, _, events, done in texts:
            assert (status, done) == (200, True)
            for index in range(2):
                choices = [c for e in events for c in e["choices"] if c["index"] == index]
                assert "".join(c["text"] for c in choices) == undisturbed(tokenizer)
        await proxy.until_idle()


async def test_a_grammar_that_fails_at_a_worker_ends_its_request_alone(
    stand: StandFactory,
) -> None:
    async with stand() as proxy:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 8}
        for index in (0, 3):
            for worker in proxy.workers:
                worker.behavior.error_at = index
            reply = await proxy.http.post("/v1/completions", json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["message"] == "grammar: fault"
            stream = await proxy.http.post("/v1/completions", json={**body, "stream": True})
            assert stream.status_code == (400 if index == 0 else 200)
            assert "grammar: fault" in stream.text
            assert "[DONE]" not in stream.text
            await proxy.until_idle()
        assert len(proxy.decoders[0].works) == 4  # never tried again
