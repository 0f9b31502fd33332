"""Clients that leave: in every phase, over HTTP and gRPC, everything is given back."""

import asyncio
from typing import Any

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests.proxy.conftest import MODEL, Stand, StandFactory

PROMPT = "The lighthouse stood at the end of the pier, and its keeper was old."


def slow_down(proxy: Stand, phase: str) -> None:
    """Make requests stay in a phase."""
    if phase == "reserve":
        proxy.decoders[0].behavior.reserve_delay_s = 30
    elif phase == "prefill":
        proxy.prefillers[0].behavior.prefill_delay_s = 30
    elif phase == "transfer":
        proxy.prefillers[0].behavior.transfer_delay_s = 30
    else:
        proxy.decoders[0].behavior.token_delay_s = 30


async def until_in(proxy: Stand, phase: str) -> None:
    prefiller, decoder = proxy.prefillers[0], proxy.decoders[0]
    if phase == "reserve":
        await proxy.until(lambda: bool(decoder.held))
    elif phase == "prefill":
        await proxy.until(lambda: bool(prefiller.held))
    elif phase == "transfer":
        await proxy.until(lambda: "activate" in decoder.received)
    else:
        labels = {"model_name": MODEL, "role": "proxy"}
        name = "vllm:inter_token_latency_seconds_count"
        await proxy.until(lambda: proxy.metric(name, **labels) > 0)


PHASES = ["reserve", "prefill", "transfer", "decode"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("phase", PHASES)
async def test_an_http_client_that_leaves_frees_both_workers(
    stand: StandFactory, phase: str, is_stream: bool
) -> None:
    async with stand() as proxy:
        slow_down(proxy, phase)
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 50, "stream": is_stream}
        request = asyncio.create_task(proxy.http.post("/v1/completions", json=body))
        await until_in(proxy, phase)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await proxy.until_idle()
        assert proxy.metric("pdserve_disconnects_total", phase=phase) == 1
        assert proxy.metric("pdserve_requests_cancelled_total") == 1
        assert len(proxy.decoders[0].cancelled) == 1
        assert len(proxy.prefillers[0].cancelled) == (phase in ("prefill", "transfer"))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_grpc_client_that_leaves_frees_both_workers(
    stand: StandFactory, phase: str, is_stream: bool
) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        slow_down(proxy, phase)
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(
            model=MODEL, text=PROMPT, options=inference_pb2.GenerationOptions(max_tokens=50)
        )
        call: Any = stub.GenerateStream(request) if is_stream else stub.Generate(request)
        waiting = asyncio.ensure_future(_drain(call) if is_stream else _await(call))
        await until_in(proxy, phase)
        call.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await proxy.until_idle()
        assert proxy.metric("pdserve_disconnects_total", phase=phase) == 1


async def _drain(call: Any) -> None:
    async for _ in call:
        pass


async def _await(call: Any) -> None:
    await call


async def test_a_client_that_leaves_the_queue_is_forgotten(stand: StandFactory) -> None:
    async with stand(max_concurrent_requests=1) as proxy:
        slow_down(proxy, "decode")
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 50}
        first = asyncio.create_task(proxy.http.post("/v1/completions", json=body))
        await until_in(proxy, "decode")
        second = asyncio.create_task(proxy.http.post("/v1/completions", json=body))
        await proxy.until(lambda: proxy.server.service.state().num_queued == 1)
        second.cancel()
        await proxy.until(lambda: proxy.server.service.state().num_queued == 0)
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        await proxy.until_idle()
        assert proxy.metric("pdserve_disconnects_total", phase="queued") == 1
        proxy.decoders[0].behavior.token_delay_s = 0
        reply = await proxy.http.post("/v1/completions", json=body)
        assert reply.status_code == 200


async def test_all_choices_are_cancelled(stand: StandFactory) -> None:
    async with stand() as proxy:
        slow_down(proxy, "decode")
        body = {"model": MODEL, "prompt": [PROMPT, "b"], "n": 3, "max_tokens": 50}
        request = asyncio.create_task(proxy.http.post("/v1/completions", json=body))
        await proxy.until(lambda: len(proxy.decoders[0].held) == 6)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await proxy.until_idle()
        assert len(proxy.decoders[0].cancelled) == 6


async def test_live_keys_are_renewed_and_ended_ones_are_not(stand: StandFactory) -> None:
    async with stand() as proxy:
        slow_down(proxy, "transfer")
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 50}
        request = asyncio.create_task(proxy.http.post("/v1/completions", json=body))
        await until_in(proxy, "transfer")
        await proxy.until(lambda: len(proxy.prefillers[0].renewed) == 1)
        await proxy.until(lambda: len(proxy.decoders[0].renewed) == 1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await proxy.until_idle()
        num_renewals = proxy.decoders[0].received.count("renew")
        await asyncio.sleep(0.3)
        assert proxy.decoders[0].received.count("renew") <= num_renewals + 1


async def test_a_reader_that_stops_is_cut_off_and_hurts_nobody(stand: StandFactory) -> None:
    async with stand(client_write_timeout_s=0.5) as proxy:
        proxy.decoders[0].behavior.token_delay_s = 0
        body = (
            b'{"model":"default","prompt":"' + PROMPT.encode() + b'","max_tokens":8000,'
            b'"stream":true,"logprobs":20}'
        )
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", proxy.server.http_port, limit=1024
        )
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )
        await reader.readline()
        await proxy.until(
            lambda: proxy.metric("pdserve_requests_cancelled_total") == 1, timeout_s=20
        )
        await proxy.until_idle()
        reply = await proxy.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 3}
        )
        assert reply.status_code == 200
        writer.close()
