"""Clients that people have, unmodified, against real workers and the packaged model."""

import asyncio
import json
import subprocess
from collections.abc import Iterator

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import PACKAGED_NAME
from tests.integration.service import Service

pytestmark = pytest.mark.multiprocess

MODEL = PACKAGED_NAME
MESSAGES = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def service(packaged_service: Service) -> Iterator[Service]:
    yield packaged_service
    packaged_service.assert_idle()


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_chat_answers_sensibly_and_counts_usage(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0
    )
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.usage is not None
    assert 1 <= reply.usage.completion_tokens <= 24
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_streamed_chat_equals_the_whole_one(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**options)
    text, usage = "", None
    for chunk in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_openai_completions_with_seed_and_n_repeat(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        reply = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=16, temperature=0.9, seed=3, n=3
        )
        return [choice.text for choice in reply.choices]

    first = texts()
    assert len(set(first)) > 1
    assert texts() == first


def test_logprobs_of_the_first_token_sum_to_at_most_one(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=5
    )
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    for entry in content:
        assert entry.token == entry.top_logprobs[0].token
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert max(values) <= 0


async def test_async_openai_clients_share_the_service(service: Service) -> None:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none") as client:

        async def ask(i: int) -> str:
            reply = await client.completions.create(
                model=MODEL, prompt=f"Fact number {i}:", max_tokens=12, temperature=0
            )
            return reply.choices[0].text

        together = await asyncio.gather(*(ask(i) for i in range(8)))
        assert together == [await ask(i) for i in range(8)]


def test_curl_streams_server_sent_events(service: Service) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "max_tokens": 8}
    done = subprocess.run(
        [
            *("curl", "-sN", f"{service.url}/v1/chat/completions"),
            *("-H", "Content-Type: application/json", "-d", json.dumps(body)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0][6:])["choices"][0]["delta"]["role"] == "assistant"


def test_a_generated_grpc_client_gets_the_same_answer(
    service: Service, client: openai.OpenAI
) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0
    )
    with grpc.insecure_channel(service.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="pdserve.v1.Inference"), timeout=10
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.ChatRequest(
            model=MODEL,
            messages=[inference_pb2.ChatMessage(**message) for message in MESSAGES],
            options=inference_pb2.GenerationOptions(max_tokens=24, temperature=0),
        )
        reply = stub.Chat(request, timeout=60)
        assert reply.choices[0].text == whole.choices[0].message.content
        chunks = list(stub.ChatStream(request, timeout=60))
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        assert text == reply.choices[0].text
        assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens


def transfer_failures(service: Service) -> int:
    """As all workers count them."""
    found = [worker.stats() for worker in service.workers]
    return sum(
        stats.failures.get("failure_transfer", 0) + sum(p.num_failures for p in stats.transfers)
        for stats in found
    )


def test_one_token_and_stop_strings_need_no_decode_work(
    service: Service, client: openai.OpenAI
) -> None:
    (decoder,) = service.of_role("decoder")
    before = decoder.stats().num_generated_tokens
    failed_before = transfer_failures(service)
    prompt = "The five boxing wizards jump quickly over the lazy dog, and then the old captain"
    one = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, temperature=0)
    assert one.choices[0].finish_reason == "length"
    stop = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=8, temperature=0, stop=one.choices[0].text
    )
    assert stop.choices[0].finish_reason == "stop"
    assert stop.choices[0].text == ""
    eos = client.completions.create(model=MODEL, prompt=prompt, logit_bias={"2": 100})
    assert eos.choices[0].finish_reason == "stop"
    assert decoder.stats().num_generated_tokens == before
    # What the first token made needless was withdrawn: no worker calls that a failure.
    service.assert_idle()
    assert transfer_failures(service) == failed_before


def test_cached_tokens_are_right(client: openai.OpenAI) -> None:
    token_ids = [(1000 + 7 * i) % 20_000 for i in range(320)]
    cached = []
    for _ in range(2):
        reply = client.completions.create(
            model=MODEL, prompt=token_ids, max_tokens=2, temperature=0
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert 9 * 32 <= (cached[1] or 0) <= 319
