"""Requests in every way to draw tokens."""

from collections.abc import Sequence
from typing import Any

import tests.npu.simulator  # noqa: F401  (gives the NPU's operators CPU kernels)
from engine.request import Request, SamplingParams
from tests.npu.tokens import prompts

PLAIN: Sequence[dict[str, Any]] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.8},
    {"top_k": 40, "top_p": 0.6, "min_p": 0.02},
    {"temperature": 1.5, "min_p": 0.1},
)


def requests(options: Sequence[dict[str, Any]]) -> list[Request]:
    lengths = [3 + 7 * i for i in range(len(options))]
    return [
        Request(
            request_id=f"request-{i}",
            attempt=0,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(
                **{"temperature": 1.0, "seed": i, "max_tokens": 12, "ignore_eos": True} | chosen
            ),
        )
        for i, (prompt, chosen) in enumerate(zip(prompts(*lengths), options, strict=True))
    ]
