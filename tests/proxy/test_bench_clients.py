"""What `vllm bench serve` sends, and how it reads the answer.

Bodies, headers and the reading of the stream are written after that client as of mid 2026
(vllm/benchmarks/lib/endpoint_request_func.py); the client itself needs all of vllm to be installed.
"""

import codecs
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.proxy.conftest import MODEL, Stand, StandFactory

OUTPUT_LEN = 24
PROMPT = "The lighthouse stood at the end of the pier, and its keeper was old."


@dataclass
class Output:
    """What the client makes of one request."""

    text: str = ""
    num_chunks: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False


class EventReader:
    """Events of a stream whose pieces had their surrounding blanks stripped, as the client does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""

    def feed(self, piece: bytes) -> list[str]:
        self._text += self._decoder.decode(piece.strip())
        *events, self._text = self._text.split("\n\n")
        # The blank line after the last event was stripped: it is whole if it is JSON.
        rest = self._text.removeprefix("data: ").strip()
        if rest == "[DONE]" or _is_json(rest):
            events.append(self._text)
            self._text = ""
        return [event.strip() for event in events if event.strip()]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


async def ask(proxy: Stand, path: str, body: dict[str, Any]) -> Output:
    """Send a request and read it as it comes."""
    output, reader = Output(), EventReader()
    headers = {"content-type": "application/json", "x-request-id": "bench-0"}
    async with proxy.http.stream("POST", path, json=body, headers=headers) as reply:
        assert reply.status_code == 200
        async for piece in reply.aiter_raw():
            for event in reader.feed(piece):
                data = event.removeprefix("data: ")
                if data == "[DONE]":
                    output.is_done = True
                    continue
                chunk = json.loads(data)
                if choices := chunk.get("choices"):
                    output.num_chunks += 1
                    text = choices[0].get("text") or choices[0].get("delta", {}).get("content")
                    output.text += text or ""
                elif usage := chunk.get("usage"):
                    output.usage = usage
    return output


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": (
        "/v1/completions",
        {
            "prompt": PROMPT,
            "repetition_penalty": 1.0,
            "max_tokens": OUTPUT_LEN,
            "logprobs": None,
            "ignore_eos": True,
        },
    ),
    "openai, token ids, sampled": (
        "/v1/completions",
        {
            "prompt": [905, 282, 253, 260],
            "repetition_penalty": 1.0,
            "max_tokens": OUTPUT_LEN,
            "logprobs": 1,
            "ignore_eos": True,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.0,
        },
    ),
    "openai-chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
            "max_completion_tokens": OUTPUT_LEN,
            "ignore_eos": True,
        },
    ),
}


@pytest.mark.parametrize("name", BODIES)
async def test_the_benchmark_of_vllm_reads_every_token(stand: StandFactory, name: str) -> None:
    path, options = BODIES[name]
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    async with stand() as proxy:
        # It waits for the server, and asks which model there is, before it begins.
        assert (await proxy.http.get("/health")).status_code == 200
        assert (await proxy.http.get("/v1/models")).json()["data"][0]["id"] == MODEL
        whole = (await proxy.http.post(path, json={"model": MODEL, **options})).json()
        choice = whole["choices"][0]
        output = await ask(proxy, path, {"model": MODEL, **options, **streaming})
        assert output.is_done
        assert output.text == choice.get("text", choice.get("message", {}).get("content"))
        assert output.usage["completion_tokens"] == OUTPUT_LEN
        assert output.usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        assert 2 <= output.num_chunks <= OUTPUT_LEN + 1
        # It counts on these, with /metrics before and after.
        assert "vllm:time_to_first_token_seconds" in (await proxy.http.get("/metrics")).text
