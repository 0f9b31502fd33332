"""What public bug reports of systems of this kind describe, on real workers.

Others of these cases are pinned where their subject is: tiny prompts in test_tokens.py, a first
token that ends a request in test_clients.py, deaths and cancellations in test_faults.py, bad values
in tests/proxy/test_errors.py and test_error_table.py.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from engine.request import SamplingParams
from protos import worker_pb2
from tests.integration.alone import tokens_alone
from tests.integration.conftest import TINY_CONTEXT
from tests.integration.relay import Refused, Relay
from tests.integration.service import Service, Worker, wait_until
from tests.integration.streams import counter, greedy, prompt_of, stream_text

pytestmark = pytest.mark.multiprocess

BLOCK_SIZE = 32
EOS = 0
GAP_S = 2.0


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[Service]:
    with Service(
        tiny_model,
        prefillers=2,
        decoders=2,
        worker={"max_num_batched_tokens": 64, "kv_cache_bytes": 8 << 20},
        decoder={"max_num_batched_tokens": 128},
        proxy={"worker_silence_s": 3.0},
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _idle(service: Service) -> Iterator[None]:
    yield
    service.publish()
    service.wait_ready()
    service.assert_idle()


def post(service: Service, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(f"{service.url}{path}", json={"model": "test-model", **body}, timeout=60)


def work_done(service: Service) -> dict[str, int]:
    """How many tokens each worker has ever computed."""
    return {w.engine_id: w.stats().num_computed_tokens for w in service.workers if w.alive}


@contextmanager
def relayed(service: Service, role: str) -> Iterator[list[Relay]]:
    """Put a relay before every worker of a role."""
    with ExitStack() as stack:
        relays = []
        for worker in service.of_role(role):
            relays.append(Relay(worker.entry()))
            stack.callback(relays[-1].close)
        others = [w.entry() for w in service.workers if w.role != role]
        # Without the workers first: a known one keeps its session.
        service.controller.set(others)
        wait_until(lambda: len(service.status()["workers"]) == len(others), 10, "workers left")
        service.controller.set([*others, *(relay.entry for relay in relays)])
        wait_until(lambda: all_connected(service, len(service.workers)), 10, "relays connected")
        yield relays
        service.publish()


def all_connected(service: Service, number: int) -> bool:
    workers = service.status()["workers"]
    return len(workers) == number and all(worker["connected"] for worker in workers)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_over_long_prompt_is_refused_before_any_worker_sees_it(
    service: Service, is_stream: bool
) -> None:
    before = work_done(service)
    words = "fox " * (TINY_CONTEXT + 10)
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("/v1/completions", "prompt", {"prompt": prompt_of(TINY_CONTEXT + 10, 1)}),
        ("/v1/chat/completions", "messages", {"messages": [{"role": "user", "content": words}]}),
        ("/v1/completions", "max_tokens", {"prompt": "Hello", "max_tokens": TINY_CONTEXT + 800}),
    ]
    for path, param, body in cases:
        reply = post(service, path, stream=is_stream, **body)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert error["type"] == "invalid_request_error"
    assert work_done(service) == before


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_a_worker_refuses_is_an_error_of_the_client_and_asked_once(
    service: Service, is_stream: bool
) -> None:
    num_reserved = 0

    def refuse(message: worker_pb2.WorkerMessage) -> None:
        nonlocal num_reserved
        if message.WhichOneof("message") == "reserved":
            num_reserved += 1
            key = message.reserved.key
            code = worker_pb2.FAILURE_INVALID
            message.failed.CopyFrom(worker_pb2.Failed(key=key, code=code, message="no such thing"))

    with relayed(service, "decoder") as relays:
        for relay in relays:
            relay.on_reply = refuse
        reply = post(service, prompt=prompt_of(100, 2), max_tokens=4, stream=is_stream)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == "no such thing"
        assert num_reserved == 1


@pytest.mark.parametrize("kind", ["reserve", "activate"])
def test_workers_that_break_every_session_are_a_503_and_never_an_empty_200(
    service: Service, kind: str
) -> None:
    def refuse(message: worker_pb2.ProxyMessage) -> None:
        if message.WhichOneof("message") == kind:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT)

    with relayed(service, "decoder") as relays:
        for relay in relays:
            relay.on_request = refuse
        reply = post(service, prompt=prompt_of(100, 3), max_tokens=20)
        assert reply.status_code == 503
        assert reply.json()["error"]["type"] == "service_unavailable_error"
        reply = post(service, prompt=prompt_of(100, 3), max_tokens=20, stream=True)
        if kind == "reserve":  # nothing was computed: there is no stream yet
            assert reply.status_code == 503
        else:  # the prefillers' first tokens are out
            events = [line[6:] for line in reply.text.splitlines() if line]
            assert "error" in json.loads(events[-1])


def colocated_tokens(model_path: Path, prompt: list[int], sampling: SamplingParams) -> list[int]:
    (tokens,) = tokens_alone(model_path, [(prompt, sampling)])
    return tokens


def test_dependent_fields_hold_together_and_give_the_colocated_tokens(
    service: Service, tiny_model: Path
) -> None:
    # EOS would be first without min_tokens.
    bias = {EOS: 100.0}
    prompt = prompt_of(3 * BLOCK_SIZE + 5, 4)
    sampling = SamplingParams(logit_bias=bias, min_tokens=5, max_tokens=8)
    expected = colocated_tokens(tiny_model, prompt, sampling)
    assert 5 <= len(expected) <= 8
    biases = {"logit_bias": {str(EOS): 100.0}}
    options: dict[str, Any] = {"temperature": 0, "min_tokens": 5, "n": 2, "logprobs": 3, **biases}
    reply = post(service, prompt=prompt, max_tokens=8, return_token_ids=True, **options).json()
    for choice in reply["choices"]:
        assert choice["token_ids"] == expected
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["tokens"]) == len(expected)
    assert reply["usage"]["completion_tokens"] == 2 * len(expected)
    options |= {"logprobs": True, "top_logprobs": 3, "response_format": {"type": "text"}}
    messages = [{"role": "user", "content": "The quick brown fox"}]
    reply = post(
        service, "/v1/chat/completions", messages=messages, max_completion_tokens=8, **options
    ).json()
    assert 10 <= reply["usage"]["completion_tokens"] <= 16


@pytest.mark.parametrize("read_s", [0.0, 0.7], ids=["before the KV arrived", "after it"])
def test_a_client_that_leaves_between_prefill_and_decode_costs_nothing(
    service: Service, read_s: float
) -> None:
    def hold(message: worker_pb2.ProxyMessage) -> None:
        if message.WhichOneof("message") == "activate":
            time.sleep(GAP_S)

    cancelled = counter(service, "pdserve_requests_cancelled_total")
    with relayed(service, "decoder") as relays:
        for relay in relays:
            relay.on_request = hold
        before = {w.engine_id: w.stats().num_generated_tokens for w in service.of_role("decoder")}
        body = {**greedy(prompt_of(500, int(5 + read_s * 10)), 400), "stream": True}
        with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as reply:
            first = next(line for line in reply.iter_lines() if line)
            assert "error" not in json.loads(first[6:])
            time.sleep(read_s)
        service.assert_idle()
        assert counter(service, "pdserve_requests_cancelled_total") == cancelled + 1
        for worker in service.of_role("decoder"):
            # The Cancel overtakes no Activate: at most the steps between the two.
            assert worker.stats().num_generated_tokens - before[worker.engine_id] < 50


async def test_a_client_that_leaves_during_prefill_stops_it_within_a_chunk(
    service: Service,
) -> None:
    num_tokens, chunk = 3900, 64
    cancelled: list[int] = []

    def prefilled() -> int:
        return sum(w.stats().num_computed_tokens for w in service.of_role("prefiller"))

    def note(message: worker_pb2.ProxyMessage) -> None:
        if message.WhichOneof("message") == "cancel":
            cancelled.append(prefilled())

    with relayed(service, "prefiller") as relays:
        for relay in relays:
            relay.on_request = note
        before = await asyncio.to_thread(prefilled)
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
            task = asyncio.create_task(stream_text(client, greedy(prompt_of(num_tokens, 9), 8)))
            await until(lambda: prefilled() > before, "prefill began")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(service.assert_idle)
            stopped = await asyncio.to_thread(prefilled)
            assert stopped - before < num_tokens - 2 * chunk, "it was over before it was cancelled"
            # One chunk was under way, one may have begun while the count was taken.
            assert stopped - cancelled[0] <= 2 * chunk
            await stream_text(client, greedy(prompt_of(40, 10), 4))
            assert await asyncio.to_thread(prefilled) - stopped <= 40


def test_cached_tokens_are_counted_alike_whole_and_streamed(service: Service) -> None:
    prompt = prompt_of(10 * BLOCK_SIZE, 6)
    usages = [post(service, prompt=prompt, max_tokens=2).json()["usage"] for _ in range(2)]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = post(service, prompt=prompt, max_tokens=2, **options).text.split("\n\n")
    usages.append(json.loads(lines[-3][6:])["usage"])
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    assert 9 * BLOCK_SIZE <= cached[1] <= 10 * BLOCK_SIZE - 1
    assert cached[2] == cached[1]


def statuses(service: Service) -> tuple[int, int, int]:
    paths = ("/v1/models", "/health", "/ready")
    models, health, ready = (httpx.get(f"{service.url}{path}", timeout=10) for path in paths)
    if models.status_code == 200:
        assert models.json()["data"][0]["id"] == "test-model"
    return models.status_code, health.status_code, ready.status_code


def is_left(service: Service, worker: Worker) -> bool:
    found = {w["engine_id"]: w for w in service.status()["workers"]}
    return not found[worker.engine_id]["connected"]


def test_models_are_listed_and_requests_served_with_a_sick_worker(service: Service) -> None:
    sick = [service.of_role("prefiller")[0], service.of_role("decoder")[0]]
    last = service.of_role("decoder")[1]
    try:
        for worker in sick:
            worker.pause()
        assert statuses(service) == (200, 200, 200)
        prompts = [prompt_of(100, 700 + i) for i in range(4)]
        assert [post(service, prompt=p, max_tokens=4).status_code for p in prompts] == [200] * 4
        wait_until(lambda: all(is_left(service, worker) for worker in sick), 20, "both are left")
        assert statuses(service) == (200, 200, 200)
        last.pause()
        wait_until(lambda: statuses(service) == (200, 200, 503), 20, "not ready without decoders")
        assert post(service, prompt=[5], max_tokens=4).status_code == 503
    finally:
        for worker in (*sick, last):
            worker.resume()
    wait_until(lambda: statuses(service) == (200, 200, 200), 20, "ready again")


async def test_a_stream_outlives_the_drain_of_its_decoder(service: Service) -> None:
    body = greedy(prompt_of(100, 8), 3500)
    async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
        expected = await stream_text(client, body)
        begun = asyncio.Event()
        task = asyncio.create_task(stream_text(client, body, begun))
        await asyncio.wait_for(begun.wait(), 20)
        drained, other = service.of_role("decoder")
        if other.stats().num_running:
            drained, other = other, drained
        entries = [worker.entry() for worker in service.workers]
        for entry in entries:
            if entry.engine_id == drained.engine_id:
                entry.state = worker_pb2.WORKER_DRAINING
        service.controller.set(entries)
        await until(lambda: is_draining(service, drained), "draining")
        computed = other.stats().num_generated_tokens
        for seed in range(6):
            await stream_text(client, greedy(prompt_of(60, 800 + seed), 4))
        assert other.stats().num_generated_tokens - computed >= 6 * 3
        assert drained.stats().num_running == 1
        assert not task.done(), "the stream was too short for this test"
        # The grace is over: it has to go.
        await asyncio.to_thread(drained.close)
        service.publish()
        assert await task == expected
    await asyncio.to_thread(service.restart, drained)


def is_draining(service: Service, worker: Worker) -> bool:
    found = {w["engine_id"]: w for w in service.status()["workers"]}
    return bool(found[worker.engine_id]["draining"])


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, 10, what)
