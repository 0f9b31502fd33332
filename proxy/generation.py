"""All choices of a request, run on the workers and merged into one stream of deltas.

Several choices of one prompt: the first runs alone until its first token, then the others start,
because by then the prompt is in the workers' prefix caches.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import xxhash

from protos import worker_pb2
from proxy.choice import ChoiceText, Delta
from proxy.handoff import Handoff
from proxy.metrics import ProxyMetrics
from proxy.request import GenerationRequest, Progress, SequenceRequest
from proxy.tokenizer import Tokenizer

_MAX_QUEUED_DELTAS = 256


@dataclass(slots=True)
class Usage:
    """Tokens of a request; the prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, delta: Delta, request: GenerationRequest) -> None:
        """Count a delta."""
        self.completion_tokens += len(delta.token_ids)
        if delta.num_cached_tokens is not None and delta.index % request.n == 0:
            self.cached_tokens += delta.num_cached_tokens


class Generator:
    """Turns a request into deltas of text."""

    def __init__(self, handoff: Handoff, tokenizer: Tokenizer, metrics: ProxyMetrics) -> None:
        self._handoff = handoff
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def stream(
        self, request: GenerationRequest, progress: Progress, *, deadline_s: float, seed: int
    ) -> AsyncGenerator[Delta, None]:
        """Yield deltas of all choices, each choice in order; close it to cancel.

        Raises: ProxyError: the request cannot go on; choices that still ran are cancelled.
        """
        if request.num_sequences == 1:
            async with aclosing(self._choice(request, 0, progress, deadline_s, seed)) as deltas:
                async for delta in deltas:
                    progress.num_output_tokens += len(delta.token_ids)
                    yield delta
            return
        queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(_MAX_QUEUED_DELTAS)
        tasks = []
        for first in range(0, request.num_sequences, request.n):
            started = asyncio.Event()
            for index in range(first, first + request.n):
                # Only the first choice reports its phase: one label per disconnect.
                seen = progress if index == 0 else Progress()
                choice = self._choice(request, index, seen, deadline_s, seed)
                waits = started if index != first else None
                tasks.append(asyncio.create_task(_pump(choice, queue, waits, started)))
        try:
            num_running = len(tasks)
            while num_running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_running -= 1
                else:
                    progress.num_output_tokens += len(item.token_ids)
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(
        self,
        request: GenerationRequest,
        index: int,
        progress: Progress,
        deadline_s: float,
        seed: int,
    ) -> AsyncGenerator[Delta, None]:
        prompt = request.prompts[index // request.n]
        sequence = SequenceRequest(
            request_id=f"{request.request_id}-{index}",
            prompt_token_ids=prompt,
            sampling=_sampling(request, _choice_seed(seed, index % request.n)),
            deadline_s=deadline_s,
            priority=request.priority,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
        )
        text = ChoiceText(request, self._tokenizer, index=index, prompt_token_ids=prompt)
        loop = asyncio.get_running_loop()
        started_s = last_s = loop.time()
        num_tokens = 0
        async with aclosing(self._handoff.run(sequence, progress)) as events:
            async for event in events:
                now_s = loop.time()
                if num_tokens:
                    self._metrics.itl.observe(now_s - last_s)
                else:
                    self._metrics.ttft.observe(now_s - started_s)
                    first_s = now_s
                last_s = now_s
                num_tokens += len(event.token_ids)
                delta = text.push(event)
                yield delta
                if text.is_finished:
                    break
        if num_tokens > 1:
            self._metrics.tpot.observe((last_s - first_s) / (num_tokens - 1))


async def _pump(
    choice: AsyncGenerator[Delta, None],
    queue: "asyncio.Queue[Delta | Exception | None]",
    waits: asyncio.Event | None,
    started: asyncio.Event,
) -> None:
    """Move one choice's deltas to the queue, then None or the error that ended it."""
    if waits is not None:
        await waits.wait()
    try:
        async with aclosing(choice):
            async for delta in choice:
                started.set()
                await queue.put(delta)
        await queue.put(None)
    except Exception as error:  # the reader of the queue raises it
        await queue.put(error)
    finally:
        started.set()


def _sampling(request: GenerationRequest, seed: int) -> worker_pb2.SamplingParams:
    max_tokens = 1 if request.drop_output else request.max_tokens
    return request.sampling.to_proto(seed=seed, max_tokens=max_tokens)


def _choice_seed(seed: int, choice: int) -> int:
    """Seed of a choice: the request's own for the first, independent ones for the others."""
    if choice == 0:
        return seed & 0xFFFF_FFFF_FFFF_FFFF
    return xxhash.xxh3_64_intdigest(f"{seed}/{choice}".encode()) >> 1
