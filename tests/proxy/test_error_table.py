"""The error table, each row over HTTP whole, HTTP streamed and gRPC, and alike on all three."""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from proxy.auth import hash_key
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


async def break_it(proxy: Stand, how: str) -> None:
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


@pytest.mark.parametrize("name", ROWS)
async def test_an_error_is_the_same_on_every_edge(stand: StandFactory, name: str) -> None:
    row = ROWS[name]
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(stand(**row.config))
        await break_it(proxy, row.breaks)
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
        await proxy.until_idle()
