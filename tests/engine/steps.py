"""Requests on a poisoned cache, step by step: what a model computes, without a scheduler."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.adapters import Adapters
from engine.batch import BatchBuilder
from engine.collectives import Group, max_over
from engine.config import Quantization
from engine.kv_caches import poisoned_caches
from engine.kv_layout import kv_layout
from engine.models import CausalLM, build_model
from engine.parallel import Parallel
from engine.request import Request, SamplingParams
from engine.scheduler_output import ScheduledRequest
from engine.weights import load_model_config, load_weights
from kernels.ops import Ops

VOCAB_SIZE = 96


def load(
    path: Path, ops: Ops, parallel: Parallel | None = None, quantization: Quantization = "none"
) -> CausalLM:
    """This rank's part of the model in a folder or file, ready to run."""
    model = build_model(load_model_config(path), ops, parallel)
    load_weights(path, model, quantization=quantization)
    return model


def random_token_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def make_request(token_ids: Sequence[int], **sampling: Any) -> Request:
    return Request(
        request_id=f"request-{token_ids[0]}-{len(token_ids)}",
        attempt=0,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(**sampling),
    )


class PoisonedCache:
    """KV caches full of NaN, whose blocks are dealt out in random order."""

    def __init__(
        self,
        model: CausalLM,
        num_blocks: int,
        block_size: int,
        seed: int = 0,
        parallel: Parallel | None = None,
        dtype: str = "float32",
    ) -> None:
        self.block_size = block_size
        place = None if parallel is None else parallel.config
        self.layout = kv_layout(model.config, block_size, place, dtype)
        self.k_caches, self.v_caches = poisoned_caches(self.layout, num_blocks)
        generator = torch.Generator().manual_seed(seed)
        self._free = torch.randperm(num_blocks, generator=generator).tolist()

    def allocate(self, request: Request) -> None:
        """Give the request blocks for all its tokens."""
        count = -(-request.num_tokens // self.block_size) - len(request.block_ids)
        request.block_ids += [self._free.pop() for _ in range(count)]


def logits_by_steps(
    model: CausalLM,
    cache: PoisonedCache,
    sequences: Sequence[Sequence[int]],
    take: Callable[[int, int], int],
    lockstep: Group | None = None,
) -> list[Tensor]:
    """Logits at every token; each step computes `take(sequence, tokens left)` of each sequence.

    With ranks in lockstep: a rank whose sequences are done runs dummy rows until all are.
    """
    requests = [make_request(token_ids) for token_ids in sequences]
    for request in requests:
        cache.allocate(request)
    return logits_of_requests(model, cache, requests, take, lockstep)


@torch.inference_mode()
def logits_of_requests(
    model: CausalLM,
    cache: PoisonedCache,
    requests: Sequence[Request],
    take: Callable[[int, int], int],
    lockstep: Group | None = None,
    adapters: Adapters | None = None,
) -> list[Tensor]:
    """Logits at every token that is left to compute; the requests hold their blocks.

    adapters: those of the model that requests have.
    """
    builder = BatchBuilder(cache.k_caches, cache.v_caches, cache.block_size)
    rows: list[list[Tensor]] = [[] for _ in requests]
    while True:
        chosen = []
        for i, request in enumerate(requests):
            left = request.num_tokens - request.num_computed_tokens
            if left and (count := min(left, take(i, left))):
                chosen.append((i, ScheduledRequest(request, count)))
        if not any(max_over(lockstep, [len(chosen)]) if lockstep else [len(chosen)]):
            return [torch.cat(parts) for parts in rows]
        batch = builder.build([e for _, e in chosen]) if chosen else builder.dummy()
        rows_of = adapters.rows_of([entry for _, entry in chosen]) if adapters else {}
        with adapters.batch.set(rows_of) if adapters else nullcontext():
            logits = model.logits(model(batch.input_ids, batch.positions, batch.kv))
        parts = logits.split([entry.num_tokens for _, entry in chosen]) if chosen else ()
        for (i, entry), part in zip(chosen, parts, strict=True):
            rows[i].append(part)
            entry.request.num_computed_tokens += entry.num_tokens
