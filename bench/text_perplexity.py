"""Perplexity of a model on a fixed text."""

import math
from collections.abc import Sequence
from pathlib import Path

from engine.config import Quantization
from engine.kv_caches import poisoned_caches
from engine.kv_layout import kv_layout
from engine.models import build_model
from engine.request import Request, SamplingParams
from engine.runner import Runner
from engine.scheduler_output import ScheduledRequest
from engine.weights import load_model_config, load_weights
from kernels.ops import Ops

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
BLOCK_SIZE, CHUNK = 32, 512


def perplexity(
    path: Path,
    quantization: Quantization,
    ops: Ops,
    token_ids: Sequence[int],
    cache_dtype: str = "float32",
) -> float:
    """exp of the mean negative log-likelihood of each token after the first."""
    config = load_model_config(path)
    built = build_model(config, ops)
    load_weights(path, built, quantization=quantization)
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    layout = kv_layout(config, BLOCK_SIZE, dtype=cache_dtype)
    caches = poisoned_caches(layout, num_blocks + ops.num_spare_blocks)
    runner = Runner(built, *caches, ops, BLOCK_SIZE)
    sampling = SamplingParams(num_prompt_logprobs=0, max_tokens=1)
    request = Request("text", 0, list(token_ids), len(token_ids), sampling)
    request.block_ids = list(range(num_blocks))
    total = 0.0
    while request.num_computed_tokens < len(token_ids):
        count = min(CHUNK, len(token_ids) - request.num_computed_tokens)
        output = runner.run([ScheduledRequest(request, count)])
        total += sum(entry.logprob for part in output.prompt_logprobs for entry in part.entries)
        request.num_computed_tokens += count
    return math.exp(-total / (len(token_ids) - 1))
