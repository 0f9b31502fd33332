"""Structured output, tools and the rarer options, by the official client against real workers."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import grpc
import httpx
import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from protos import inference_pb2, inference_pb2_grpc
from tests.integration.service import Service

pytestmark = pytest.mark.multiprocess

MODEL = "smollm2-135m-instruct"
MESSAGES: list[Any] = [{"role": "user", "content": "Invent a person. Answer in JSON."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    age: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def service(packaged_model: Path) -> Iterator[Service]:
    with Service(packaged_model, model_name=MODEL, decoders=2) as running:
        yield running
        running.assert_idle()


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def test_every_choice_at_temperature_one_validates(client: openai.OpenAI) -> None:
    validator = Draft202012Validator(SCHEMA)
    for seed in range(4):
        reply = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            n=4,
            temperature=1.0,
            seed=seed,
            max_tokens=200,
            response_format=json_schema(SCHEMA),
        )
        for choice in reply.choices:
            assert choice.finish_reason == "stop"
            validator.validate(json.loads(choice.message.content or ""))


def test_parse_returns_the_callers_own_type(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Person, max_tokens=60
    )
    assert isinstance(reply.choices[0].message.parsed, Person)


def test_guided_options_hold_streamed_and_whole(client: openai.OpenAI) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"guided_regex": r"[a-c]{3}-\d{2}/x"}, r"[a-c]{3}-\d{2}/x"),
        ({"guided_choice": ["naïve\n", "yes", "no way"]}, "naïve\n|yes|no way"),
        ({"guided_grammar": 'root ::= "a" ("b" | "c")* "d"'}, "a[bc]*d"),
        ({"structured_outputs": {"regex": "x{2,4}"}}, "x{2,4}"),
        ({"guided_json": {"type": "integer", "minimum": 10, "maximum": 12}}, r"\s*1[0-2]"),
        ({"guided_regex": "ab?", "min_tokens": 30}, "ab?"),
    ]
    for extra, pattern in cases:
        options: Any = {
            "model": MODEL,
            "prompt": "Hello",
            "max_tokens": 64,
            "temperature": 1.0,
            "seed": 5,
            "extra_body": extra,
        }
        whole = client.completions.create(**options).choices[0].text
        assert re.fullmatch(pattern, whole), (extra, whole)
        chunks = client.completions.create(**options, stream=True)
        assert "".join(c.text for chunk in chunks for c in chunk.choices) == whole


def test_a_grammar_survives_the_death_of_a_decoder(service: Service, client: openai.OpenAI) -> None:
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 100_000, "maximum": 999_999},
        "minItems": 40,
        "maxItems": 40,
    }
    options: Any = {
        "model": MODEL,
        "prompt": "Numbers: ",
        "max_tokens": 1500,
        "temperature": 1.0,
        "seed": 11,
        "extra_body": {"guided_json": schema},
    }
    undisturbed = client.completions.create(**options).choices[0].text
    text, victim = "", None
    for chunk in client.completions.create(**options, stream=True):
        text += "".join(choice.text for choice in chunk.choices)
        if victim is None and len(text) > 40:
            busy = [w for w in service.of_role("decoder") if w.stats().num_running]
            victim = busy[0]
            victim.kill()
    assert victim is not None
    assert len(json.loads(text)) == 40
    assert text == undisturbed
    service.restart(victim)


def test_a_forced_tool_call_has_valid_arguments(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        options: Any = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Weather in Oslo?"}],
            "tools": [WEATHER],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "max_tokens": 120,
            "temperature": 0.7,
            "seed": 1,
        }
        reply = client.chat.completions.create(**options).choices[0]
        (call,) = reply.message.tool_calls or ()
        assert call.function.name == "get_weather"
        Draft202012Validator(WEATHER["function"]["parameters"]).validate(
            json.loads(call.function.arguments)
        )
        assert reply.message.content is None
        assert reply.finish_reason == ("tool_calls" if choice == "required" else "stop")
        with client.chat.completions.stream(**options) as stream:
            final = stream.get_final_completion().choices[0]
        (streamed,) = final.message.tool_calls or ()
        assert streamed.function.arguments == call.function.arguments
        assert final.finish_reason == reply.finish_reason


def test_a_conversation_with_tool_results_goes_on(client: openai.OpenAI) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Oslo", "unit": "C"}'}
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "Weather in Oslo?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": -3}'},
        ],
        tools=[WEATHER],
        max_tokens=20,
        temperature=0,
    )
    assert reply.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_the_same_over_grpc(service: Service) -> None:
    with grpc.insecure_channel(service.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.ChatRequest(
            messages=[inference_pb2.ChatMessage(role="user", content="Weather in Oslo?")],
            tools_json=json.dumps([WEATHER]),
            tool_choice_json="required",
            parallel_tool_calls=False,
            options=inference_pb2.GenerationOptions(max_tokens=120, seed=3, temperature=1.0),
        )
        whole = stub.Chat(request, timeout=60).choices[0]
        assert whole.finish_reason == "tool_calls"
        arguments = whole.tool_calls[0].arguments
        Draft202012Validator(WEATHER["function"]["parameters"]).validate(json.loads(arguments))
        chunks = [c for chunk in stub.ChatStream(request, timeout=60) for c in chunk.choices]
        calls = [call for choice in chunks for call in choice.tool_calls]
        assert "".join(call.arguments for call in calls) == arguments
        guided = inference_pb2.GenerateRequest(
            text="Hello",
            options=inference_pb2.GenerationOptions(guided_json=json.dumps(SCHEMA), seed=3),
        )
        guided.options.max_tokens = 200
        text = stub.Generate(guided, timeout=60).choices[0].text
        Draft202012Validator(SCHEMA).validate(json.loads(text))


def test_best_of_returns_the_likeliest(client: openai.OpenAI) -> None:
    options: Any = {
        "model": MODEL,
        "prompt": "Once",
        "max_tokens": 8,
        "temperature": 1.5,
        "seed": 2,
    }
    every = client.completions.create(**options, n=6, logprobs=0).choices

    def mean(choice: Any) -> float:
        values = choice.logprobs.token_logprobs
        return float(sum(values) / len(values))

    ranked = [choice.text for choice in sorted(every, key=mean, reverse=True)]
    best = client.completions.create(**options, n=2, best_of=6)
    assert [choice.text for choice in best.choices] == ranked[:2]
    assert [choice.logprobs for choice in best.choices] == [None, None]
    assert best.usage is not None
    assert best.usage.completion_tokens == 48


def test_prompt_logprobs_and_token_ids(service: Service) -> None:
    prompt = "The capital of France is Paris."
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    reply = httpx.post(
        f"{service.url}/v1/completions", json={**body, "prompt_logprobs": 2}, timeout=60
    ).json()["choices"][0]
    ids = httpx.post(f"{service.url}/tokenize", json={"prompt": prompt}).json()["tokens"]
    assert reply["prompt_token_ids"] == ids
    assert len(reply["token_ids"]) == 2
    assert reply["prompt_logprobs"][0] is None
    for token_id, entry in zip(ids[1:], reply["prompt_logprobs"][1:], strict=True):
        assert str(token_id) in entry
        assert 2 <= len(entry) <= 3
    echoed = service.complete(prompt, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    for own, entry, token_id in zip(
        echoed["logprobs"]["token_logprobs"][1:], reply["prompt_logprobs"][1:], ids[1:], strict=True
    ):
        assert own == pytest.approx(entry[str(token_id)]["logprob"], abs=1e-3)
    spelled = service.complete(prompt, max_tokens=2, logprobs=1, return_tokens_as_token_ids=True)
    tokens = spelled["choices"][0]["logprobs"]["tokens"]
    assert tokens == [f"token_id:{token_id}" for token_id in reply["token_ids"]]


def test_the_final_message_is_continued(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    reply = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=4,
        temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert "Paris" in (reply.choices[0].message.content or "")
