"""Usage against what workers say they computed, and options at their limits, on real workers."""

import json
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
    with Service(tiny_model, decoders=2, proxy={"local_prefill_tokens": 40}) as running:
        yield running
        running.assert_idle()


def prompt(start: int, length: int) -> list[int]:
    return [3 + (start * 131 + 17 * i) % 390 for i in range(length)]


def computed(service: Service) -> int:
    return sum(worker.stats().num_computed_tokens for worker in service.workers if worker.alive)


def usage_of(service: Service, before: int, reply: dict[str, Any]) -> tuple[int, int]:
    """(cached tokens as reported, tokens that the workers did not compute)."""
    service.assert_idle()
    usage = reply["usage"]
    # Every output token but the last is computed as an input once.
    num_inputs = usage["prompt_tokens"] + usage["completion_tokens"] - len(reply["choices"])
    return usage["prompt_tokens_details"]["cached_tokens"], num_inputs - (
        computed(service) - before
    )


def test_cached_tokens_are_those_that_no_worker_computed(service: Service) -> None:
    options = {"max_tokens": 6, "ignore_eos": True}
    base = prompt(1, 200)
    cases = [
        (base, 0),  # prefilled remotely
        (base, 192),  # the rest on the decoder, or on the prefiller's own cache
        ([*base[:128], *prompt(2, 100)], 128),
        (prompt(3, 20), 0),  # short: on the decoder
        (prompt(3, 20), 0),  # no full block
    ]
    for token_ids, at_most in cases:
        before = computed(service)
        reply = service.complete(token_ids, **options)
        cached, not_computed = usage_of(service, before, reply)
        assert cached == not_computed
        assert cached <= at_most
        assert cached % 32 == 0
    again = service.complete(base, **options)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_choices_of_one_prompt_count_it_once(service: Service) -> None:
    token_ids = prompt(7, 100)
    for expected in (0, 96):
        reply = service.complete(token_ids, n=4, max_tokens=4, ignore_eos=True, seed=1)
        usage = reply["usage"]
        assert usage["prompt_tokens"] == 100
        assert usage["completion_tokens"] == 16
        assert usage["prompt_tokens_details"]["cached_tokens"] == expected
    batch = [prompt(8, 100), token_ids]
    reply = service.complete(batch, n=2, max_tokens=4, ignore_eos=True, seed=1)
    assert reply["usage"]["prompt_tokens"] == 200
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


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


def test_a_migration_changes_no_usage(service: Service) -> None:
    token_ids, options = prompt(9, 120), {"max_tokens": 200, "ignore_eos": True, "seed": 5}
    whole = service.complete(token_ids, **options)
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    body = {
        "model": service.model_name,
        "prompt": prompt(10, 120),
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0,
        **options,
    }
    victim, usages = None, []
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            usages.append(json.loads(line[6:])["usage"])
            if victim is None and usages[-1]["completion_tokens"] > 20:
                (victim, *_) = [w for w in service.of_role("decoder") if w.stats().num_running]
                victim.kill()
    assert victim is not None
    assert usages[-1] == {
        "prompt_tokens": 120,
        "completion_tokens": 200,
        "total_tokens": 320,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    service.restart(victim)
