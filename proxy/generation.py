"""All choices of a request, run on the workers; what they gain goes to one sink.

Several choices of one prompt: the first runs alone until its first token, then the others start,
because by then the prompt is in the workers' prefix caches.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

import xxhash

from protos import worker_pb2
from proxy.choice import ChoiceText, Delta
from proxy.handoff import Handoff
from proxy.metrics import ProxyMetrics
from proxy.request import GenerationRequest, Progress, SequenceRequest, TokenEvent
from proxy.tokenizer import Tokenizer


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


class DeltaSink(Protocol):
    """Takes what the choices of a request gain, each choice's deltas in order."""

    @property
    def usage(self) -> Usage:
        """Of what was pushed so far."""

    def push(self, delta: Delta) -> bool:
        """Take a delta, at once; False: `ready` has to be awaited before this choice's next one."""

    def push_text(self, index: int, text: str, token_ids: list[int]) -> bool:
        """The same as `push` of a choice's delta that has nothing else."""

    async def ready(self) -> None:
        """Wait until another delta may be pushed."""


class Generator:
    """Turns a request into deltas of text."""

    def __init__(self, handoff: Handoff, tokenizer: Tokenizer, metrics: ProxyMetrics) -> None:
        self._handoff = handoff
        self._tokenizer = tokenizer
        self._metrics = metrics

    async def run(
        self,
        request: GenerationRequest,
        progress: Progress,
        sink: DeltaSink,
        *,
        deadline_s: float,
        seed: int,
    ) -> None:
        """Push the deltas of all choices; cancel it to end them.

        Raises: ProxyError: the request cannot go on; choices that still ran are cancelled.
        """
        if request.num_sequences == 1:
            await self._choice(
                request, 0, _Outlet(progress, sink, asyncio.Event()), deadline_s, seed
            )
            return
        tasks = []
        for first in range(0, request.num_sequences, request.n):
            started = asyncio.Event()
            for index in range(first, first + request.n):
                # Only the first choice reports its phase: one label per disconnect.
                seen = progress if index == 0 else Progress()
                outlet = _Outlet(seen, sink, started, is_first=index == first)
                choice = self._choice(request, index, outlet, deadline_s, seed)
                tasks.append(asyncio.create_task(choice))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _choice(
        self,
        request: GenerationRequest,
        index: int,
        outlet: "_Outlet",
        deadline_s: float,
        seed: int,
    ) -> None:
        if not outlet.is_first:
            await outlet.started.wait()
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
        sink = _ChoiceSink(text, outlet, self._metrics)
        try:
            await self._handoff.run(sequence, outlet.progress, sink)
        finally:
            outlet.started.set()
        sink.end()


@dataclass(frozen=True, slots=True)
class _Outlet:
    """Where the deltas of one choice go."""

    progress: Progress
    """Its own."""
    sink: DeltaSink
    started: asyncio.Event
    """Set by the first choice of the prompt; the others wait for it."""
    is_first: bool = True


class _ChoiceSink:
    """Tokens of one choice in, deltas out, and the times between them."""

    __slots__ = (
        "_first_s",
        "_last_s",
        "_metrics",
        "_now_s",
        "_num_tokens",
        "_sink",
        "_started",
        "_started_s",
        "_text",
    )

    def __init__(self, text: ChoiceText, outlet: _Outlet, metrics: ProxyMetrics) -> None:
        self._text = text
        self._sink = outlet.sink
        self._started = outlet.started
        self._metrics = metrics
        self._now_s = asyncio.get_running_loop().time
        self._last_s = self._started_s = self._now_s()
        self._first_s = 0.0
        self._num_tokens = 0

    @property
    def is_finished(self) -> bool:
        """Whether nothing can follow."""
        return self._text.is_finished

    def push(self, event: TokenEvent) -> bool:
        """Take an event; False: finished, or `ready` has to be awaited."""
        now_s = self._now_s()
        if self._num_tokens:
            self._metrics.itl.observe(now_s - self._last_s)
        else:
            self._metrics.ttft.observe(now_s - self._started_s)
            self._first_s = now_s
            self._started.set()
        self._last_s = now_s
        self._num_tokens += len(event.token_ids)
        delta = self._text.push(event)
        return self._sink.push(delta) and not self._text.is_finished

    def push_tokens(self, token_ids: list[int]) -> bool:
        """Take tokens that have nothing else."""
        text = self._text.plain_text(token_ids)
        if text is None:
            return self.push(TokenEvent(token_ids))
        now_s = self._now_s()
        self._metrics.itl.observe(now_s - self._last_s)
        self._last_s = now_s
        self._num_tokens += len(token_ids)
        return self._sink.push_text(self._text.index, text, token_ids)

    async def ready(self) -> None:
        """Wait until another event may be pushed."""
        await self._sink.ready()

    def end(self) -> None:
        """Count the finished choice."""
        if self._num_tokens > 1:
            self._metrics.tpot.observe((self._last_s - self._first_s) / (self._num_tokens - 1))


def _sampling(request: GenerationRequest, seed: int) -> worker_pb2.SamplingParams:
    max_tokens = 1 if request.drop_output else request.max_tokens
    return request.sampling.to_proto(seed=seed, max_tokens=max_tokens)


def _choice_seed(seed: int, choice: int) -> int:
    """Seed of a choice: the request's own for the first, independent ones for the others."""
    if choice == 0:
        return seed & 0xFFFF_FFFF_FFFF_FFFF
    return xxhash.xxh3_64_intdigest(f"{seed}/{choice}".encode()) >> 1
