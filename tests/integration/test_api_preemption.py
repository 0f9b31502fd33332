"""Structured output on a random model, in a cache so small that requests preempt each other."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from tests.integration.service import Service

pytestmark = pytest.mark.multiprocess

SCHEMA = {
    "type": "object",
    "properties": {
        "ids": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1000, "maximum": 9999},
            "minItems": 12,
            "maxItems": 20,
        },
        "word": {"type": "string", "pattern": "^[a-z]{3,9}$"},
        "maybe": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["ids", "word", "maybe"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[Service]:
    with Service(tiny_model, worker={"num_blocks": 24, "max_model_len": 700}) as running:
        yield running
        running.assert_idle()


def test_every_output_validates_through_preemption(service: Service) -> None:
    validator = Draft202012Validator(SCHEMA)
    options = {"guided_json": SCHEMA, "temperature": 1.0, "max_tokens": 600, "n": 8}
    seen: dict[int, list[str]] = {}
    for _ in range(2):
        for seed in range(3):
            choices = service.complete("Answer: ", seed=seed, **options)["choices"]
            assert {choice["finish_reason"] for choice in choices} == {"stop"}
            texts = [choice["text"] for choice in choices]
            for text in texts:
                validator.validate(json.loads(text))
            assert seen.setdefault(seed, texts) == texts
    (decoder,) = service.of_role("decoder")
    assert decoder.stats().num_preemptions > 0
