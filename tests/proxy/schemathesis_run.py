"""Runs schemathesis against a served OpenAPI document, off the event loop that serves it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance


@dataclass(slots=True)
class Result:
    """What came of it."""

    statuses: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


async def run_examples(url: str, num_examples: int) -> Result:
    """`num_examples` of each operation, valid and invalid ones."""
    return await asyncio.to_thread(_run, url, num_examples)


def _run(url: str, num_examples: int) -> Result:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    result = Result()
    for found in schema.get_all_operations():
        operation = found.ok()
        modes = [schemathesis.GenerationMode.POSITIVE]
        if operation.body:
            modes.append(schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:
            try:
                _try(url, operation.as_strategy(generation_mode=mode), num_examples, result)
            except Exception as error:  # every kind of finding is one
                result.problems.append(f"{operation.label}, {mode}: {error}"[:2000])
    return result


def _try(url: str, strategy: Any, num_examples: int, result: Result) -> None:
    checks = [not_a_server_error, status_code_conformance, content_type_conformance]

    @hypothesis.settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=strategy)
    def run(case: schemathesis.Case) -> None:
        response = case.call(base_url=url, timeout=30)
        status = str(response.status_code)
        result.statuses[status] = result.statuses.get(status, 0) + 1
        case.validate_response(response, checks=checks)

    run()
