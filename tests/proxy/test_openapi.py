"""The OpenAPI document is true: routes, replies and statuses are those that are really there."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai.types.chat import ChatCompletion
from starlette.routing import Route

from proxy.app import create_app
from proxy.openapi import build_document
from proxy.service import Service
from tests.proxy.conftest import MODEL, StandFactory
from tests.proxy.schemathesis_run import run_examples

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def validator(document: dict[str, Any], name: str) -> Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return Draft202012Validator(schema)


async def test_every_route_is_documented_and_no_other(stand: StandFactory) -> None:
    async with stand() as proxy:
        service: Service = proxy.server.service
        gate: Any = create_app(service)
        routes = {
            (route.path.replace(":path", ""), method.lower())
            for route in gate._app.routes
            if isinstance(route, Route)
            for method in (route.methods or set()) - {"HEAD"}
        }
        document = (await proxy.http.get("/openapi.json")).json()
        documented = {(path, method) for path, item in document["paths"].items() for method in item}
        assert documented == routes
        assert "security" not in document
        assert build_document("1", needs_key=True)["security"]


async def test_replies_are_as_documented(stand: StandFactory) -> None:
    extras = {"return_token_ids": True, "n": 2, "max_tokens": 3, "stop": ["zzz"], "model": MODEL}
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "tools": [TOOL]}
    text = {"prompt": ["Hello", [5, 6]], "logprobs": 2, "echo": True}
    async with stand() as proxy:
        document = (await proxy.http.get("/openapi.json")).json()

        async def check(method: str, path: str, name: str, body: Any = None) -> None:
            reply = await proxy.http.request(method, path, json=body)
            responses = document["paths"][path][method.lower()]["responses"]
            content = responses[str(reply.status_code)]["content"]["application/json"]
            assert content["schema"]["$ref"].endswith(f"/{name}")
            validator(document, name).validate(reply.json())

        for more in ({}, {"prompt_logprobs": 2}):
            body = {**chat, **extras, **more}
            await check("POST", "/v1/chat/completions", "ChatCompletion", body)
            await check("POST", "/v1/completions", "Completion", {**text, **extras, **more})
        await check("POST", "/v1/chat/completions", "Error", {})
        await check("POST", "/v1/completions", "Error", {"prompt": 5})
        await check("POST", "/v1/embeddings", "Error", {"input": "a"})
        await check("GET", "/v1/models", "ModelList")
        await check("POST", "/tokenize", "Tokens", {"prompt": "a", "return_token_strs": True})
        await check("POST", "/detokenize", "Text", {"tokens": [5]})
        for path, name in (("/health", "Status"), ("/ready", "Readiness"), ("/version", "Version")):
            await check("GET", path, name)
        for path, name, options in (
            ("/v1/chat/completions", "ChatCompletionChunk", chat),
            ("/v1/completions", "CompletionChunk", text),
        ):
            usage = {"include_usage": True, "continuous_usage_stats": True}
            body = {**options, **extras, "stream": True, "stream_options": usage}
            reply = await proxy.http.post(path, json=body)
            events = [line[6:] for line in reply.text.splitlines() if line]
            assert events.pop() == "[DONE]"
            for event in events:
                validator(document, name).validate(json.loads(event))


async def test_the_official_types_accept_the_replies(stand: StandFactory) -> None:
    async with stand() as proxy:
        reply = await proxy.http.post(
            "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 2}
        )
        ChatCompletion.model_validate(reply.json(), strict=True)


@pytest.mark.parametrize("num_examples", [4, pytest.param(180, marks=pytest.mark.slow)])
async def test_generated_requests_get_documented_statuses_and_no_5xx(
    stand: StandFactory, num_examples: int
) -> None:
    """Operations with a body get valid and invalid ones: some 60 in make test, 2,000 if slow."""
    async with stand(max_concurrent_requests=64) as proxy:
        for worker in proxy.workers:
            worker.behavior.token_delay_s = 0.0
        result = await run_examples(proxy.url, num_examples)
        assert result.problems == []
        assert sum(result.statuses.values()) >= 11 * num_examples
        assert {"200", "400"} <= set(result.statuses)
        await proxy.until_idle()
