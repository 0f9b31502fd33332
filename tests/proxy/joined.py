"""Events of a stream, put together."""

from typing import Any


def join(events: list[dict[str, Any]], num_choices: int) -> list[dict[str, Any]]:
    """Choices of a stream, put together."""
    joined = [
        {"text": "", "ids": [], "logprobs": [], "reason": None, "stop": None}
        for _ in range(num_choices)
    ]
    for event in events:
        for choice in event["choices"]:
            into = joined[choice["index"]]
            assert into["reason"] is None
            into["text"] += choice.get("text", "") or choice.get("delta", {}).get("content", "")
            into["ids"] += choice.get("token_ids", [])
            into["logprobs"] += entries(choice["logprobs"])
            into["reason"] = choice["finish_reason"]
            into["stop"] = choice.get("stop_reason")
    return joined


def entries(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(*(logprobs[name] for name in ("tokens", "token_logprobs", "text_offset"))))  # noqa: B905
