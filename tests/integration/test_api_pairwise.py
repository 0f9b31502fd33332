"""Pairs of options on real workers: the whole reply and the joined stream are the same.

tests/proxy/test_pairwise.py tries every pair alone on scripted workers; here requests of four
options cover all pairs of those that a real sampler, grammar or cache could tell apart.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.service import Service
from tests.proxy.joined import entries, join

pytestmark = pytest.mark.multiprocess

SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "n": {"n": 3},
    "stop": {"stop": ["a", "12"]},
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "regex": {"guided_regex": "[a-c]{2,6}"},
    "sampling": {"temperature": 1.2, "top_k": 20, "min_p": 0.01, "top_p": 0.9},
    "penalties": {"presence_penalty": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "logit_bias": {"logit_bias": {"28": 4.0}},
    "min_tokens": {"min_tokens": 7},
    "ignore_eos": {"ignore_eos": True},
    "batch": {"prompt": ["Once upon a time", "The number is"]},
    "token_ids": {"return_token_ids": True, "return_tokens_as_token_ids": True},
}
ILLEGAL = [{"json_schema", "regex"}, {"json_schema", "ignore_eos"}, {"regex", "ignore_eos"}]


@pytest.fixture(scope="module")
def service(packaged_service: Service) -> Iterator[Service]:
    yield packaged_service
    packaged_service.assert_idle()


def covering() -> list[tuple[str, ...]]:
    """Sets of at most four options that hold every legal pair."""
    pairs = {
        frozenset(pair) for pair in itertools.combinations(OPTIONS, 2) if set(pair) not in ILLEGAL
    }
    missing, chosen = set(pairs), []
    while missing:
        found = sorted(min(missing, key=sorted))
        while len(found) < 4:
            gains = {
                name: sum(frozenset((name, other)) in missing for other in found)
                for name in OPTIONS
                if name not in found and all(frozenset((name, o)) in pairs for o in found)
            }
            found.append(max(gains, key=lambda name: gains[name]))
        chosen.append(tuple(found))
        missing -= {frozenset(pair) for pair in itertools.combinations(found, 2)}
    return chosen


def test_pairs_of_options_stream_what_they_return(service: Service) -> None:
    base = {"prompt": "Numbers: ", "max_tokens": 10, "seed": 11, "temperature": 0.8}
    with httpx.Client(base_url=service.url, timeout=60) as http:
        for names in covering():
            body = dict(base)
            for name in names:
                body |= OPTIONS[name]
            reply = http.post("/v1/completions", json=body)
            assert reply.status_code == 200, (names, reply.text)
            whole = reply.json()
            expected = [
                {
                    "text": choice["text"],
                    "ids": choice.get("token_ids", []),
                    "logprobs": entries(choice["logprobs"]),
                    "reason": choice["finish_reason"],
                    "stop": choice["stop_reason"],
                }
                for choice in whole["choices"]
            ]
            streaming = {"stream": True, "stream_options": {"include_usage": True}}
            text = http.post("/v1/completions", json={**body, **streaming}).text
            lines = [line[6:] for line in text.splitlines() if line]
            assert lines.pop() == "[DONE]"
            events = [json.loads(line) for line in lines]
            found = join(events, len(expected))
            for one, other in zip(found, expected, strict=True):
                # A token's log-probability differs in its last digits with the batch it is in.
                assert _rounded(one) == _rounded(other), names
            usage = events[-1]["usage"]
            assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
            assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def _rounded(choice: dict[str, Any]) -> dict[str, Any]:
    entries_ = [
        (token, None if value is None else round(value, 3), offset)
        for token, value, offset in choice["logprobs"]
    ]
    return {**choice, "logprobs": entries_}
