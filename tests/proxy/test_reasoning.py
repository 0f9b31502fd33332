"""Thoughts and tool calls of a model, as clients see them: whole, streamed and over gRPC."""

import json
from typing import Any

import grpc
import pytest

from protos import inference_pb2, inference_pb2_grpc
from proxy.tokenizer import Tokenizer
from tests.proxy.conftest import MODEL, Stand, StandFactory
from tests.proxy.fakes import scripted

MESSAGES = [{"role": "user", "content": "Weather in Oslo?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "n": [1, 2]}}\n</tool_call>'
)
ARGUMENTS = '{"city": "Oslo", "n": [1, 2]}'

# name -> (text of the model, reasoning, content, arguments of the call)
CASES: dict[str, tuple[str, str, str | None, str | None]] = {
    "thoughts": ("<think>It is 東京 🙂?</think>\n\nNo, Oslo.", "It is 東京 🙂?", "No, Oslo.", None),
    "no thoughts": ("Oslo <think> is cold", "", "Oslo <think> is cold", None),
    "unfinished thoughts": ("<think>Well, </thin", "Well, </thin", "", None),
    "thoughts and a call": (f"<think>I look.</think>\n{CALL}", "I look.", None, ARGUMENTS),
    "text and a call": (f"I look.\n{CALL}", "", "I look.", ARGUMENTS),
}


def script(proxy: Stand, tokenizer: Tokenizer, text: str) -> None:
    for worker in proxy.workers:
        worker.behavior.token = scripted([*tokenizer.encode(text, add_special_tokens=False), 2])
        worker.behavior.token_delay_s = 0.0


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of a stream make, and how it ended."""
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "arguments": ""}
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        message["reasoning_content"] += delta.get("reasoning_content", "")
        message["content"] += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            message["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize("name", CASES)
async def test_reasoning_and_calls_are_split_off(
    stand: StandFactory, tokenizer: Tokenizer, name: str
) -> None:
    text, reasoning, content, arguments = CASES[name]
    reason = "tool_calls" if arguments else "stop"
    body = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "max_tokens": 200}
    async with stand(reasoning_format="think") as proxy:
        script(proxy, tokenizer, text)
        reply = (await proxy.http.post("/v1/chat/completions", json=body)).json()
        (choice,) = reply["choices"]
        message = choice["message"]
        assert message.get("reasoning_content", "") == reasoning
        assert message["content"] == content
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        assert calls == ([arguments] if arguments else [])
        assert choice["finish_reason"] == reason

        streamed = await proxy.http.post("/v1/chat/completions", json={**body, "stream": True})
        lines = [line[6:] for line in streamed.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
        assert joined(events) == {
            "reasoning_content": reasoning,
            "content": content or "",
            "arguments": arguments or "",
            "finish_reason": reason,
        }
        if reasoning:
            pieces = [e for e in events if e["choices"][0]["delta"].get("reasoning_content")]
            assert len(pieces) > 1

        request = inference_pb2.ChatRequest(
            messages=[inference_pb2.ChatMessage(**message) for message in MESSAGES],
            tools_json=json.dumps([TOOL]),
            options=inference_pb2.GenerationOptions(max_tokens=200),
        )
        async with grpc.aio.insecure_channel(proxy.grpc_address) as channel:
            (over_grpc,) = (await inference_pb2_grpc.InferenceStub(channel).Chat(request)).choices
        assert over_grpc.reasoning_content == reasoning
        assert over_grpc.text == (content or "")
        assert [call.arguments for call in over_grpc.tool_calls] == calls
        assert over_grpc.finish_reason == reason
        await proxy.until_idle()


async def test_models_stay_as_they_are_while_workers_are_away(stand: StandFactory) -> None:
    async with stand(worker_wait_s=0.1) as proxy:
        for worker in proxy.workers:
            await worker.stop()
            worker.max_model_len = 700
            await worker.start()
        proxy.controller.publish()
        listed = []
        service = proxy.server.service
        await proxy.until(lambda: service.max_model_len() == 700)
        listed.append((await proxy.http.get("/v1/models")).json())
        for worker in proxy.workers:
            await worker.stop()
        await proxy.until(lambda: not service.is_ready)
        listed.append((await proxy.http.get("/v1/models")).json())
        assert listed[0] == listed[1]
        assert listed[0]["data"][0]["max_model_len"] == 700
        assert (await proxy.http.get(f"/v1/models/{MODEL}")).status_code == 200
        tokens = (await proxy.http.post("/tokenize", json={"prompt": "a"})).json()
        assert tokens["max_model_len"] == 700
