"""gRPC clients that mean no good, or no sense: a status for them, and service for the others."""

import asyncio
from typing import Any

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests.proxy.conftest import StandFactory

Code = grpc.StatusCode
Options = inference_pb2.GenerationOptions
Request = inference_pb2.GenerateRequest
DEEP = '{"a":' * 900 + "1" + "}" * 900
TOO_DEEP = "[" * 200_000


def chat(**options: Any) -> inference_pb2.ChatRequest:
    message = inference_pb2.ChatMessage(role="user", content="Hello")
    return inference_pb2.ChatRequest(messages=[message], options=Options(max_tokens=2), **options)


# name -> (method, request, statuses that are right)
CASES: dict[str, tuple[str, Any, set[grpc.StatusCode]]] = {
    "no prompt": ("Generate", Request(), {Code.INVALID_ARGUMENT}),
    "no ids": ("Generate", Request(token_ids=inference_pb2.TokenIds()), {Code.INVALID_ARGUMENT}),
    "no texts": ("Generate", Request(texts=inference_pb2.Texts()), {Code.INVALID_ARGUMENT}),
    "huge id": (
        "Generate",
        Request(token_ids=inference_pb2.TokenIds(ids=[2**32 - 1])),
        {Code.INVALID_ARGUMENT},
    ),
    "nan": (
        "Generate",
        Request(text="a", options=Options(temperature=float("nan"))),
        {Code.INVALID_ARGUMENT},
    ),
    "infinity": (
        "Generate",
        Request(text="a", options=Options(top_p=float("inf"))),
        {Code.INVALID_ARGUMENT},
    ),
    "nan bias": (
        "Generate",
        Request(text="a", options=Options(logit_bias={"5": float("nan")})),
        {Code.INVALID_ARGUMENT},
    ),
    "deep schema": (
        "Generate",
        Request(text="a", options=Options(guided_json=DEEP, max_tokens=2)),
        {Code.OK, Code.INVALID_ARGUMENT},
    ),
    "too deep schema": (
        "Generate",
        Request(text="a", options=Options(guided_json=TOO_DEEP)),
        {Code.INVALID_ARGUMENT},
    ),
    "too deep format": (
        "Generate",
        Request(text="a", options=Options(response_format_json=TOO_DEEP)),
        {Code.INVALID_ARGUMENT},
    ),
    "two constraints": (
        "Generate",
        Request(text="a", options=Options(guided_regex="a", guided_grammar="b")),
        {Code.INVALID_ARGUMENT},
    ),
    "no messages": ("Chat", inference_pb2.ChatRequest(), {Code.INVALID_ARGUMENT}),
    "no role": (
        "Chat",
        inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(content="a")]),
        {Code.INVALID_ARGUMENT},
    ),
    "deep kwargs": ("Chat", chat(chat_template_kwargs_json=DEEP), {Code.OK}),
    "kwargs that are a list": (
        "Chat",
        chat(chat_template_kwargs_json="[]"),
        {Code.INVALID_ARGUMENT},
    ),
    "tools that are no JSON": ("Chat", chat(tools_json="{"), {Code.INVALID_ARGUMENT}),
    "tools that are a number": ("Chat", chat(tools_json="5"), {Code.INVALID_ARGUMENT}),
    "nan in tools": ("Chat", chat(tools_json='[{"a":NaN}]'), {Code.INVALID_ARGUMENT}),
    "surrogate in tools": ("Chat", chat(tools_json='["\\ud800"]'), {Code.INVALID_ARGUMENT}),
    "surrogate in a schema": (
        "Generate",
        Request(text="a", options=Options(guided_json='{"const":"\\ud800"}', max_tokens=2)),
        {Code.OK, Code.INVALID_ARGUMENT},
    ),
    "surrogate in kwargs": (
        "Chat",
        chat(chat_template_kwargs_json='{"x":"\\ud800"}'),
        {Code.OK, Code.INVALID_ARGUMENT},
    ),
    "surrogate in a described tool": (
        "Chat",
        chat(
            tools_json='[{"type":"function","function":{"name":"f","description":"\\ud800"}}]',
        ),
        {Code.OK, Code.INVALID_ARGUMENT},
    ),
    "choice that names nothing": (
        "Chat",
        chat(tool_choice_json='{"type":"function","function":{"name":"f"}}'),
        {Code.INVALID_ARGUMENT},
    ),
    "tokenize nothing": ("Tokenize", inference_pb2.TokenizeRequest(), {Code.OK}),
    "detokenize nothing": ("Detokenize", inference_pb2.DetokenizeRequest(), {Code.OK}),
    "detokenize a huge id": (
        "Detokenize",
        inference_pb2.DetokenizeRequest(tokens=[2**32 - 1]),
        {Code.INVALID_ARGUMENT},
    ),
}


async def test_strange_messages_get_the_right_status(stand: StandFactory) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for name, (method, request, statuses) in CASES.items():
            call = getattr(stub, method)(request, timeout=20)
            assert await call.code() in statuses, (name, await call.details())
            if method in ("Generate", "Chat"):
                stream = getattr(stub, method + "Stream")(request, timeout=20)
                try:
                    while await stream.read() is not grpc.aio.EOF:
                        pass
                except grpc.aio.AioRpcError as error:
                    assert error.code() in statuses, (name, error.details())  # noqa: PT017
        await proxy.until_idle()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_deadline_of_the_client_ends_the_request(
    stand: StandFactory, is_stream: bool
) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        proxy.decoders[0].behavior.token_delay_s = 0.05
        request = Request(text="Hello", options=Options(max_tokens=5000))
        with pytest.raises(grpc.aio.AioRpcError) as ended:  # noqa: PT012
            if is_stream:
                async for _ in stub.GenerateStream(request, timeout=0.4):
                    pass
            else:
                await stub.Generate(request, timeout=0.4)
        assert ended.value.code() == Code.DEADLINE_EXCEEDED
        await proxy.until_idle()
        # On a busy machine the deadline may come before the decoder has heard of the request.
        assert len(proxy.decoders[0].cancelled) == len(proxy.decoders[0].works)


async def test_calls_that_are_cancelled_at_any_moment_leave_nothing(stand: StandFactory) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        proxy.decoders[0].behavior.token_delay_s = 0.002
        request = Request(text="Hello", options=Options(max_tokens=300, n=2))

        async def ask(pause_s: float, is_stream: bool) -> None:
            call: Any = stub.GenerateStream(request) if is_stream else stub.Generate(request)
            await asyncio.sleep(pause_s)
            call.cancel()
            await asyncio.gather(call.code(), return_exceptions=True)

        await asyncio.gather(*(ask(i * 0.003, bool(i % 2)) for i in range(40)))
        await proxy.until_idle()
        state = proxy.server.service.state()
        assert state.num_in_flight == 0
        reply = await stub.Generate(Request(text="Hello", options=Options(max_tokens=2)))
        assert reply.usage.completion_tokens == 2
