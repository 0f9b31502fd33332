"""Every refusal: the same over HTTP (whole and streamed) and gRPC, before any worker sees it."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import openai
import pytest

from protos import inference_pb2, inference_pb2_grpc
from proxy.errors import ProxyError
from tests.proxy.conftest import MODEL, Stand, StandFactory

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@dataclass(frozen=True)
class Case:
    """A chat option that is refused."""

    options: dict[str, Any]
    param: str
    mentions: tuple[str, ...] = ()
    status: int = 400
    code: str = "invalid_value"
    grpc_status: grpc.StatusCode | None = INVALID
    """None: cannot be expressed over gRPC."""
    grpc_param: str = field(default="")


CASES = {
    "max_tokens 0": Case({"max_tokens": 0}, "max_tokens", ("1", "0")),
    "max_tokens -1": Case({"max_tokens": -1}, "max_tokens", ("-1",), grpc_status=None),
    "max_tokens 1e9": Case(
        {"max_tokens": 10**9}, "max_tokens", ("1000000000",), code="context_length_exceeded"
    ),
    "max_tokens 9000": Case(
        {"max_tokens": 9000}, "max_tokens", ("9000", "8192"), code="context_length_exceeded"
    ),
    "max_completion_tokens 9000": Case(
        {"max_completion_tokens": 9000},
        "max_completion_tokens",
        ("9000",),
        code="context_length_exceeded",
        grpc_status=None,
    ),
    "max_tokens text": Case({"max_tokens": "5"}, "max_tokens", ("integer",), grpc_status=None),
    "max_tokens fraction": Case({"max_tokens": 1.5}, "max_tokens", ("1.5",), grpc_status=None),
    "temperature -1": Case({"temperature": -1.0}, "temperature", ("-1", "0")),
    "temperature 3": Case({"temperature": 3.0}, "temperature", ("3", "2")),
    "temperature text": Case({"temperature": "hot"}, "temperature", ("hot",), grpc_status=None),
    "top_p 0": Case({"top_p": 0.0}, "top_p"),
    "top_p 2": Case({"top_p": 2.0}, "top_p"),
    "top_k -2": Case({"top_k": -2}, "top_k"),
    "min_p 2": Case({"min_p": 2.0}, "min_p"),
    "presence_penalty 3": Case({"presence_penalty": 3.0}, "presence_penalty"),
    "frequency_penalty -3": Case({"frequency_penalty": -3.0}, "frequency_penalty"),
    "repetition_penalty 0": Case({"repetition_penalty": 0.0}, "repetition_penalty"),
    "n 0": Case({"n": 0}, "n"),
    "n 17": Case({"n": 17}, "n", ("17", "16")),
    "17 stop strings": Case({"stop": ["x"] * 17}, "stop", ("17", "16")),
    "10000 stop strings": Case({"stop": ["x"] * 10_000}, "stop", ("10000",)),
    "long stop string": Case({"stop": ["x" * 2000]}, "stop", ("2000", "1024")),
    "stop number": Case({"stop": 5}, "stop", grpc_status=None),
    "top_logprobs 21": Case(
        {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ("21", "20"), grpc_status=None
    ),
    "top_logprobs alone": Case({"top_logprobs": 2}, "top_logprobs", grpc_status=None),
    "min_tokens above max_tokens": Case({"min_tokens": 9, "max_tokens": 8}, "min_tokens", ("9",)),
    "logit_bias key": Case({"logit_bias": {"x": 1.0}}, "logit_bias"),
    "logit_bias id": Case({"logit_bias": {"49152": 1.0}}, "logit_bias", ("49152", "49151")),
    "logit_bias value": Case({"logit_bias": {"5": 101.0}}, "logit_bias", ("101",)),
    "stop_token_ids": Case({"stop_token_ids": [49152]}, "stop_token_ids", ("49152",)),
    "no messages": Case({"messages": []}, "messages"),
    "unknown role": Case({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "no content": Case({"messages": [{"role": "user"}]}, "messages[0].content", grpc_status=None),
    "image": Case(
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        code="unsupported_parameter",
        grpc_status=None,
    ),
    "messages is a text": Case({"messages": "hi"}, "messages", grpc_status=None),
    "stream is a text": Case({"stream": "yes"}, "stream", grpc_status=None),
    "tool without function": Case(
        {"tools": [{"type": "function"}]},
        "tools[0].function",
        code="missing_required_parameter",
        grpc_status=None,
    ),
    "tool with a bad name": Case(
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        grpc_status=None,
    ),
    "two tools of one name": Case({"tools": [TOOL, TOOL]}, "tools", grpc_status=None),
    "5000 tool calls": Case(
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 5000}]},
        "messages[0].tool_calls",
        ("5000", "4096"),
        grpc_status=None,
    ),
    "129 tools": Case({"tools": [TOOL] * 129}, "tools", ("129", "128"), grpc_status=None),
    "tool_choice without tools": Case({"tool_choice": "required"}, "tool_choice", grpc_status=None),
    "tool_choice unknown": Case(
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        ("'g'",),
        grpc_status=None,
    ),
    "forced tool with a bad schema": Case(
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "king"}}}
            ],
            "tool_choice": "required",
        },
        "tools",
        ("king",),
        grpc_status=None,
    ),
    "json schema missing": Case(
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema.schema",
        code="missing_required_parameter",
        grpc_status=None,
    ),
    "response_format unknown": Case(
        {"response_format": {"type": "structural_tag"}},
        "response_format",
        ("structural_tag",),
        code="unsupported_parameter",
        grpc_status=None,
    ),
    "bad schema": Case({"guided_json": {"type": "king"}}, "guided_json", ("king",)),
    "unsatisfiable schema": Case(
        {"guided_json": {"type": "integer", "minimum": 5, "maximum": 1}}, "guided_json", ("5", "1")
    ),
    "schema with what cannot be kept": Case(
        {"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", ("uniqueItems",)
    ),
    "too large schema": Case({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json", ("65536",)),
    "deep schema": Case(
        {"guided_json": json.loads('{"items":' * 150 + "{}" + "}" * 150)}, "guided_json"
    ),
    "schema no JSON": Case({"guided_json": "{"}, "guided_json", grpc_status=None),
    "bad regex": Case({"guided_regex": "(["}, "guided_regex", ("unclosed",)),
    "look-ahead": Case({"guided_regex": "(?=a)b"}, "guided_regex", ("look",)),
    "regex that nothing matches": Case({"guided_regex": r"[^\s\S]"}, "guided_regex"),
    "no choices": Case({"guided_choice": [""]}, "guided_choice"),
    "bad grammar": Case({"guided_grammar": "hello(("}, "guided_grammar", ("GBNF",)),
    "unknown rule": Case({"guided_grammar": "start: nowhere"}, "guided_grammar", ("nowhere",)),
    "two constraints": Case(
        {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", ("guided_regex",)
    ),
    "ignore_eos with a grammar": Case({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    "prompt_logprobs 21": Case({"prompt_logprobs": 21}, "prompt_logprobs", ("21", "20")),
    "nothing to continue": Case(
        {"messages": [{"role": "user", "content": " "}], "continue_final_message": True},
        "continue_final_message",
        grpc_status=None,
    ),
    "unknown model": Case(
        {"model": "gpt-9"},
        "model",
        ("gpt-9", f"served: {MODEL}"),
        status=404,
        code="model_not_found",
        grpc_status=grpc.StatusCode.NOT_FOUND,
    ),
    "prompt too long": Case(
        {"messages": [{"role": "user", "content": "word " * 9000}]},
        "messages",
        ("8192",),
        code="context_length_exceeded",
    ),
    "prompt far too long": Case(
        {"messages": [{"role": "user", "content": "word " * 200_000}]},
        "messages",
        ("8192",),
        code="context_length_exceeded",
    ),
}


def assert_no_worker_saw_it(proxy: Stand) -> None:
    assert not any(worker.works for worker in proxy.workers)


def assert_refused(reply: httpx.Response, case: Case) -> None:
    assert reply.status_code == case.status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == (case.code, case.param), error
    assert all(text in error["message"] for text in case.mentions), error


async def test_bad_options_are_refused_alike_everywhere(stand: StandFactory) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for name, case in CASES.items():
            body = {"model": MODEL, "messages": MESSAGES, **case.options}
            for is_stream in (False, True):
                streaming = {} if "stream" in case.options else {"stream": is_stream}
                reply = await proxy.http.post("/v1/chat/completions", json=body | streaming)
                assert_refused(reply, case)
            if case.grpc_status is None:
                continue
            request = chat_request(body)
            for call in (stub.Chat(request), first_of(stub.ChatStream(request))):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() == case.grpc_status, name
                metadata = dict(refused.value.trailing_metadata() or ())
                assert metadata["pdserve-error-code"] == case.code
                assert metadata["pdserve-error-param"] == case.param
        assert_no_worker_saw_it(proxy)


def chat_request(body: dict[str, Any]) -> inference_pb2.ChatRequest:
    """The same request over gRPC."""
    options = {k: v for k, v in body.items() if k not in ("model", "messages")}
    if "guided_json" in options:
        options["guided_json"] = json.dumps(options["guided_json"])
    return inference_pb2.ChatRequest(
        model=body["model"],
        messages=[inference_pb2.ChatMessage(**message) for message in body["messages"]],
        options=inference_pb2.GenerationOptions(**options),
    )


async def first_of(call: Any) -> Any:
    async for item in call:
        return item


COMPLETION_CASES = {
    "no prompt": Case({}, "prompt", code="missing_required_parameter"),
    "empty prompt": Case({"prompt": ""}, "prompt"),
    "empty list": Case({"prompt": []}, "prompt"),
    "list of empty lists": Case({"prompt": [[]]}, "prompt"),
    "prompt number": Case({"prompt": 5}, "prompt"),
    "mixed ids": Case({"prompt": [1, "a"]}, "prompt"),
    "booleans": Case({"prompt": [True]}, "prompt"),
    "negative id": Case({"prompt": [-1]}, "prompt", ("-1",)),
    "id beyond the vocabulary": Case({"prompt": [49152]}, "prompt", ("49152",)),
    "too many prompts": Case({"prompt": ["a"] * 300}, "prompt", ("300", "256")),
    "too many sequences": Case({"prompt": ["a"] * 200, "n": 4}, "n", ("800", "512")),
    "prompt of ids too long": Case(
        {"prompt": [5] * 8192}, "prompt", ("8192",), code="context_length_exceeded"
    ),
    "one prompt of many too long": Case(
        {"prompt": ["a", "word " * 9000]}, "prompt", ("8192",), code="context_length_exceeded"
    ),
    "logprobs 21": Case({"prompt": "a", "logprobs": 21}, "logprobs", ("21", "20")),
    "best_of below n": Case({"prompt": "a", "n": 3, "best_of": 2}, "best_of", ("2", "3")),
    "best_of 17": Case({"prompt": "a", "best_of": 17}, "best_of", ("17", "16")),
    "best_of streamed": Case({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    "suffix": Case({"prompt": "a", "suffix": "b"}, "suffix", code="unsupported_parameter"),
    "max_tokens 0 without echo": Case({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "stream_options": Case(
        {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"
    ),
}


async def test_bad_completions_are_refused(stand: StandFactory) -> None:
    async with stand() as proxy:
        for case in COMPLETION_CASES.values():
            reply = await proxy.http.post("/v1/completions", json={"model": MODEL, **case.options})
            assert_refused(reply, case)
        assert_no_worker_saw_it(proxy)


NOT_BUILT: dict[str, Any] = {
    "use_beam_search": True,
    "functions": [],
    "audio": {},
    "modalities": ["text", "audio"],
}


@pytest.mark.parametrize("name", NOT_BUILT)
async def test_what_is_not_built_is_refused_by_name(stand: StandFactory, name: str) -> None:
    async with stand() as proxy:
        messages = [{"role": "user", "content": "a"}]
        asked = {"/v1/chat/completions": {"messages": messages}, "/v1/completions": {"prompt": "a"}}
        for path, body in asked.items():
            body = {"model": MODEL, **body, name: NOT_BUILT[name]}
            reply = await proxy.http.post(path, json=body)
            assert_refused(reply, Case({}, name, code="unsupported_parameter"))
        assert_no_worker_saw_it(proxy)
        for path, body in asked.items():
            body = {"model": MODEL, "max_tokens": 1, **body, name: None}
            assert (await proxy.http.post(path, json=body)).status_code == 200


BODIES = {
    "malformed JSON": (b'{"model": ', 400, "invalid_json"),
    "trailing garbage": (b"{} x", 400, "invalid_json"),
    "empty": (b"", 400, "invalid_json"),
    "NaN": (b'{"temperature": NaN}', 400, "invalid_json"),
    "invalid UTF-8": (b'{"model": "\xff\xfe"}', 400, "invalid_json"),
    "lone surrogate": (b'{"model": "\\ud800"}', 400, "invalid_json"),
    "deep nesting": (b"[" * 100_000, 400, "invalid_json"),
    "a list": (b"[]", 400, "invalid_value"),
    "a number": (b"5", 400, "invalid_value"),
    "5 MB": (b'{"model": "' + b"x" * 5_000_000 + b'"}', 413, "request_too_large"),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_bad_bodies_are_refused(stand: StandFactory, path: str) -> None:
    async with stand() as proxy:
        headers = {"content-type": "application/json"}
        for name, (body, status, code) in BODIES.items():
            reply = await proxy.http.post(path, content=body, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), name
        assert_no_worker_saw_it(proxy)


async def test_other_content_types_are_refused(stand: StandFactory) -> None:
    async with stand() as proxy:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            reply = await proxy.http.post(
                "/v1/completions", content=b'{"prompt":"a"}', headers={"content-type": kind}
            )
            assert reply.status_code == 400
            assert kind in reply.json()["error"]["message"]
        accepted = await proxy.http.post(
            "/v1/completions",
            content=b'{"prompt":"a","max_tokens":1}',
            headers={"content-type": "Application/JSON; charset=utf-8"},
        )
        assert accepted.status_code == 200


async def test_unknown_paths_and_methods_get_openai_bodies(stand: StandFactory) -> None:
    async with stand() as proxy:
        missing = await proxy.http.get("/v1/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        wrong = await proxy.http.get("/v1/chat/completions")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"
        embeddings = await proxy.http.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
        assert embeddings.status_code == 400
        assert "embeddings" in embeddings.json()["error"]["message"]


async def test_the_official_client_raises_its_own_errors(stand: StandFactory) -> None:
    async with stand() as proxy, proxy.client() as client:
        messages: Any = MESSAGES
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=9000)
        assert bad.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-9", messages=messages)
        assert missing.value.code == "model_not_found"


async def test_four_stop_strings_are_accepted_and_five_too(stand: StandFactory) -> None:
    async with stand() as proxy:
        for count in (4, 5, 16):
            body = {"prompt": "a", "max_tokens": 2, "stop": [f"stop{i}" for i in range(count)]}
            reply = await proxy.http.post("/v1/completions", json=body)
            assert reply.status_code == 200


async def test_undecodable_grpc_messages_are_invalid_arguments(stand: StandFactory) -> None:
    async with stand() as proxy, grpc.aio.insecure_channel(proxy.grpc_address) as channel:
        method: Any = channel.unary_unary("/pdserve.v1.Inference/Generate")
        # Field 1 (model) with two bytes that are not UTF-8, then plain rubbish, then 5 MB.
        for data in (b"\x0a\x02\xff\xfe", b"\xff\xff\xff", b"\x0a" + b"\xff" * 5_000_000):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await method(data)
            assert refused.value.code() == INVALID


async def test_a_request_beyond_the_queue_is_told_to_come_back(stand: StandFactory) -> None:
    async with stand(max_concurrent_requests=1, max_queued_requests=0) as proxy:
        proxy.decoders[0].behavior.token_delay_s = 30
        body = {"model": MODEL, "prompt": "a", "max_tokens": 5}
        first = asyncio.create_task(proxy.http.post("/v1/completions", json=body))
        await proxy.until(lambda: proxy.decoders[0].num_decode_tokens > 0)
        for is_stream in (False, True):
            reply = await proxy.http.post("/v1/completions", json={**body, "stream": is_stream})
            assert reply.status_code == 429
            assert reply.json()["error"]["type"] == "rate_limit_error"
            assert int(reply.headers["retry-after"]) >= 1
        async with grpc.aio.insecure_channel(proxy.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(inference_pb2.GenerateRequest(text="a"))
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "retry-after" in dict(refused.value.trailing_metadata() or ())
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await proxy.until_idle()


def test_every_error_has_a_distinct_class_name_and_a_body() -> None:
    pending = [ProxyError]
    while pending:
        kind = pending.pop()
        pending.extend(kind.__subclasses__())
        body = kind("message", param="p").body()["error"]
        assert body["message"] == "message"
        assert isinstance(body["code"], str)
        assert 400 <= kind.status < 600
