"""The error table, each row over HTTP whole, HTTP streamed and gRPC, and alike on all three."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from proxy.auth import hash_key
from proxy.config import Limits
from tests.proxy.conftest import MODEL, Stand, StandFactory

Code = grpc.StatusCode


@dataclass(frozen=True)
class Row:
    """How to get an error, and what it is."""

    status: int
    grpc_status: grpc.StatusCode
    kind: str
    code: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    breaks: str = ""
    retry_after: bool = False


ROWS = {
    "invalid": Row(400, Code.INVALID_ARGUMENT, "invalid_request_error", "invalid_value", {"n": 99}),
    "context": Row(
        400,
        Code.INVALID_ARGUMENT,
        "invalid_request_error",
        "context_length_exceeded",
        {"max_tokens": 100_000},
    ),
    "no key": Row(
        401,
        Code.UNAUTHENTICATED,
        "authentication_error",
        "missing_api_key",
        config={"api_key_hashes": (hash_key("k"),)},
    ),
    "wrong key": Row(
        401,
        Code.UNAUTHENTICATED,
        "authentication_error",
        "invalid_api_key",
        config={"api_key_hashes": (hash_key("k"),)},
        key="wrong",
    ),
    "no such model": Row(
        404, Code.NOT_FOUND, "invalid_request_error", "model_not_found", {"model": "gpt-9"}
    ),
    "too slow": Row(
        408,
        Code.DEADLINE_EXCEEDED,
        "timeout_error",
        "deadline_exceeded",
        config={"request_timeout_s": 0.3},
        breaks="slow",
    ),
    "over the limit": Row(
        429,
        Code.RESOURCE_EXHAUSTED,
        "rate_limit_error",
        "rate_limit_exceeded",
        config={"tokens_per_minute": 1},
        breaks="spend",
        retry_after=True,
    ),
    "too large": Row(
        413,
        Code.INVALID_ARGUMENT,
        "invalid_request_error",
        "request_too_large",
        {"stop": ["x" * 2000]},
        config={"limits": Limits(max_body_bytes=1024)},
    ),
    "queue full": Row(
        429,
        Code.RESOURCE_EXHAUSTED,
        "rate_limit_error",
        "overloaded",
        config={"max_concurrent_requests": 1, "max_queued_requests": 0},
        breaks="busy",
        retry_after=True,
    ),
    "defect": Row(500, Code.INTERNAL, "server_error", "internal_error", breaks="defect"),
    "no worker": Row(
        503,
        Code.UNAVAILABLE,
        "service_unavailable_error",
        "unavailable",
        config={"worker_wait_s": 0.1},
        breaks="gone",
        retry_after=True,
    ),
}


async def break_it(proxy: Stand, how: str) -> "asyncio.Task[Any] | None":
    """Make the error happen; a task that must be ended afterwards, if that takes one."""
    if how == "slow":
        for worker in proxy.workers:
            worker.behavior.prefill_delay_s = 30
    elif how == "spend":
        reply = await proxy.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 9})
        assert reply.status_code == 200
    elif how == "gone":
        for worker in proxy.workers:
            worker.state = worker_pb2.WORKER_DRAINING
        proxy.controller.publish()
        await proxy.until(lambda: not proxy.server.service.is_ready)
    elif how == "defect":
        service = proxy.server.service

        async def fail(body: object) -> None:
            raise RuntimeError("a defect")

        service.builder.completion = fail
    elif how == "busy":
        proxy.decoders[0].behavior.token_delay_s = 30
        body = {"prompt": "a", "max_tokens": 9}
        running = asyncio.create_task(proxy.http.post("/v1/completions", json=body))
        await proxy.until(lambda: bool(proxy.decoders[0].num_decode_tokens))
        return running
    return None


@pytest.mark.parametrize("name", ROWS)
async def test_an_error_is_the_same_on_every_edge(stand: StandFactory, name: str) -> None:
    row = ROWS[name]
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(stand(**row.config))
        running = await break_it(proxy, row.breaks)
        headers = {"authorization": f"Bearer {row.key}"} if row.key else {}
        body = {"model": MODEL, "prompt": "Hello", **row.options}
        messages = []
        for is_stream in (False, True):
            reply = await proxy.http.post(
                "/v1/completions", json={**body, "stream": is_stream}, headers=headers
            )
            assert reply.status_code == row.status, reply.text
            error = reply.json()["error"]
            assert (error["type"], error["code"]) == (row.kind, row.code)
            assert ("retry-after" in reply.headers) == row.retry_after
            messages.append(error["message"])
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(proxy.grpc_address))
        stub = inference_pb2_grpc.InferenceStub(channel)
        options = {name: value for name, value in row.options.items() if name != "model"}
        request = inference_pb2.GenerateRequest(
            model=body["model"],
            text="Hello",
            options=inference_pb2.GenerationOptions(**options),
        )
        metadata = tuple(headers.items())
        for call in (
            stub.Generate(request, metadata=metadata),
            anext(aiter(stub.GenerateStream(request, metadata=metadata))),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() == row.grpc_status
            trailing = dict(refused.value.trailing_metadata() or ())
            assert trailing["pdserve-error-code"] == row.code
            assert ("retry-after" in trailing) == row.retry_after
            messages.append(refused.value.details())
        if row.breaks != "spend":  # that one names seconds
            assert len(set(messages)) == 1
        for worker in proxy.workers:
            worker.behavior.prefill_delay_s = 0
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await proxy.until_idle()


LATE = {
    "too slow": (ROWS["too slow"], {"request_timeout_s": 0.4}),
    "no worker": (ROWS["no worker"], {"worker_wait_s": 0.1, "max_attempts": 2}),
}


async def late_error(proxy: Stand, edge: str) -> tuple[str, str, str]:
    """How an error after the first token is told: status, code and message."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 500, "stream": edge == "stream"}
    if edge != "grpc":
        reply = await proxy.http.post("/v1/completions", json=body)
        if edge == "whole":
            error = reply.json()["error"]
            return str(reply.status_code), error["code"], error["message"]
        assert reply.status_code == 200
        *events, last = [line[6:] for line in reply.text.splitlines() if line]
        assert events
        assert all("choices" in json.loads(event) for event in events)
        error = json.loads(last)["error"]
        return error["type"], error["code"], error["message"]
    request = inference_pb2.GenerateRequest(
        text="Hello", options=inference_pb2.GenerationOptions(max_tokens=500)
    )
    async with grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).GenerateStream(request)
        num_chunks = 0
        while True:
            try:
                chunk = await stream.read()
            except grpc.aio.AioRpcError as error_:
                assert num_chunks > 0
                code = dict(error_.trailing_metadata() or ())["pdserve-error-code"]
                return error_.code().name, str(code), error_.details() or ""
            assert chunk.choices
            num_chunks += 1


@pytest.mark.parametrize("name", LATE)
async def test_an_error_after_the_first_token_is_told_in_the_stream(
    stand: StandFactory, name: str
) -> None:
    row, config = LATE[name]
    told = {}
    for edge in ("whole", "stream", "grpc"):
        async with stand(**config) as proxy:
            behavior = proxy.decoders[0].behavior
            if name == "too slow":
                behavior.token_delay_s = 0.05
            else:
                behavior.die_at = "token:3"
            told[edge] = await late_error(proxy, edge)
            if name == "too slow":
                await proxy.until_idle()
    assert told["whole"][0] == str(row.status)
    assert told["stream"][0] == row.kind
    assert told["grpc"][0] == row.grpc_status.name
    assert {code for _, code, _ in told.values()} == {row.code}
    assert len({message for *_, message in told.values()}) == 1
