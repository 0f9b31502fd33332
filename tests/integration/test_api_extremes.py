"""Options at their limits, on real workers: an answer or a 400, and no worker the worse for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.service import Service

pytestmark = pytest.mark.multiprocess

PROMPT = [5, 6, 7, 8, 9, 10]
EXTREMES: list[dict[str, Any]] = [
    {"temperature": 1e-300},
    {"temperature": 1e-30, "top_p": 1e-300},
    {"temperature": 2.0, "top_p": 1e-30, "min_p": 1.0, "top_k": 1},
    {"temperature": 2.0, "top_k": 2**31 - 1, "min_p": 1e-300},
    {"temperature": 1.0, "repetition_penalty": 1e-300},
    {"temperature": 1.0, "repetition_penalty": 0.001},
    {"temperature": 1.0, "repetition_penalty": 100.0, "presence_penalty": 2.0},
    {"temperature": 1e-3, "frequency_penalty": -2.0, "presence_penalty": -2.0},
    {"temperature": 1.0, "logit_bias": {str(i): -100.0 for i in range(390)}},
    {"temperature": 1.0, "logit_bias": {str(i): 100.0 for i in range(390)}},
    {"temperature": 1e-300, "logit_bias": {"9": 100.0}, "repetition_penalty": 1e-300},
    {"stop_token_ids": list(range(390)), "min_tokens": 8},
    {"min_tokens": 8, "ignore_eos": True, "stop": [chr(i) for i in range(97, 113)]},
    {"seed": 2**64 - 1, "temperature": 1.0, "n": 16},
    {"seed": -(2**63), "temperature": 1.0, "priority": 2**31 - 1},
    {"priority": -(2**31), "cache_salt": "\x00\U0010ffff" * 100},
    {"logprobs": 20, "prompt_logprobs": 20, "echo": True, "temperature": 1e-300},
    {"logprobs": 20, "temperature": 2.0, "repetition_penalty": 1e-30},
    {"guided_regex": "(a|b){1,400}c", "temperature": 2.0, "repetition_penalty": 1e-300},
    {"guided_json": {"type": "object"}, "logit_bias": {str(i): 100.0 for i in range(390)}},
]


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[Service]:
    with Service(tiny_model) as running:
        yield running
        running.assert_idle()


def test_extreme_options_are_answered_or_refused(service: Service) -> None:
    usual = service.complete(PROMPT, max_tokens=8)["choices"][0]["text"]
    for options in EXTREMES:
        body = {"model": service.model_name, "prompt": PROMPT, "max_tokens": 8, **options}
        reply = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
        assert reply.status_code in (200, 400), (options, reply.text)
        assert (reply.status_code == 400) == (options.get("repetition_penalty", 1) < 0.001)
        if reply.status_code == 200:
            for choice in reply.json()["choices"]:
                assert choice["finish_reason"] in ("stop", "length")
        assert all(worker.alive for worker in service.workers)
    assert service.complete(PROMPT, max_tokens=8)["choices"][0]["text"] == usual
    for worker in service.workers:
        assert "failure_internal" not in worker.stats().failures
