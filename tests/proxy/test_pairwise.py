"""Every two options that are legal together: the whole reply and the joined stream are the same."""

import itertools
import json
from typing import Any

import pytest

from tests.proxy.conftest import MODEL, StandFactory
from tests.proxy.fakes import WORD_IDS
from tests.proxy.joined import entries, join

COMMON: dict[str, Any] = {
    "n": 3,
    "stop": [" and", "zzz"],
    "seed": 7,
    "temperature": 0.0,
    "max_tokens": 9,
    "min_tokens": 4,
    "logit_bias": {"5": 3.0},
    "stop_token_ids": [WORD_IDS[3]],
    "ignore_eos": True,
    "guided_json": {"type": "object"},
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "presence_penalty": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "priority": 3,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "unknown_field": {"a": 1},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PATHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/completions": (
        {"prompt": ["The lighthouse stood", "Once"]},
        {"logprobs": 2, "echo": True, "add_special_tokens": False, "best_of": 1},
    ),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "Hello"}]},
        {
            "logprobs": True,
            "tools": [TOOL],
            "tool_choice": "none",
            "chat_template_kwargs": {"x": 1},
            "return_tokens_as_token_ids": True,
        },
    ),
}
ILLEGAL = [{"ignore_eos", "guided_json"}, {"n", "best_of"}]


def is_legal(row: list[str]) -> bool:
    return not any(pair <= set(row) for pair in ILLEGAL)


def rows_of_four(names: list[str]) -> list[list[str]]:
    """Sets of four options, so that every legal pair is in one of them."""
    left = {pair for pair in itertools.combinations(names, 2) if is_legal(list(pair))}
    rows = []
    while left:
        row = list(min(left))
        while len(row) < 4:
            gains = [
                (sum(not left.isdisjoint({(a, b), (b, a)}) for b in row), a)
                for a in names
                if a not in row and is_legal([*row, a])
            ]
            row.append(max(gains)[1])
        left -= set(itertools.permutations(row, 2))
        rows.append(row)
    return rows


@pytest.mark.parametrize("path", PATHS)
async def test_every_pair_of_options_streams_what_it_returns(
    stand: StandFactory, path: str
) -> None:
    base, own = PATHS[path]
    options = {**COMMON, **own}
    async with stand(max_concurrent_requests=64) as proxy:
        for worker in proxy.workers:
            worker.behavior.token_delay_s = 0.0
        for row in rows_of_four(list(options)):
            body = {"model": MODEL, "max_tokens": 6, **base}
            body |= {name: options[name] for name in row}
            stream_options = body.pop("stream_options", None)
            if body.get("tool_choice") and "tools" not in body:
                body["tools"] = [TOOL]
            whole = await proxy.http.post(path, json=body)
            assert whole.status_code == 200, (row, whole.text)
            expected = [
                {
                    "text": choice.get("text", "") or choice.get("message", {}).get("content", ""),
                    "ids": choice.get("token_ids", []),
                    "logprobs": entries(choice["logprobs"]),
                    "reason": choice["finish_reason"],
                    "stop": choice["stop_reason"],
                }
                for choice in whole.json()["choices"]
            ]
            streaming = {"stream": True, "stream_options": stream_options}
            reply = await proxy.http.post(path, json={**body, **streaming})
            lines = [line[6:] for line in reply.text.splitlines() if line]
            assert lines.pop() == "[DONE]"
            events = [json.loads(line) for line in lines]
            assert join(events, len(expected)) == expected, row
            if stream_options:
                usage = events[-1]["usage"]
                assert usage["completion_tokens"] == whole.json()["usage"]["completion_tokens"]
        await proxy.until_idle()
