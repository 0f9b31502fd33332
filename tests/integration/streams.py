"""Greedy completions over HTTP, and what the service counts."""

import asyncio
import json
import random
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.service import Service


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Token ids that no other seed shares, so that the prefix cache cannot hide work."""
    generator = random.Random(seed)
    return [generator.randrange(3, 250) for _ in range(num_tokens)]


def greedy(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": "test-model",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def stream_text(
    client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event | None = None
) -> str:
    """The whole text of one stream; sets `begun` at its third piece."""
    text = ""
    num_pieces = 0
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    done = False
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                done = True
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            if event["choices"]:
                text += event["choices"][0]["text"]
                num_pieces += 1
                if begun is not None and num_pieces == 3:
                    begun.set()
            else:
                assert event["usage"]["completion_tokens"] == body["max_tokens"]
    assert done, "the stream ended without [DONE]"
    return text


def counter(service: Service, name: str, **labels: str) -> float:
    """Sum of a counter's samples whose labels include `labels`."""
    total = 0.0
    for family in text_string_to_metric_families(httpx.get(f"{service.url}/metrics").text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                total += sample.value
    return total
