"""A load on any OpenAI-compatible server: closed loop or Poisson arrivals, every token timed.

closed loop   `concurrency` clients, each sends its next request when the last one is over
open loop     requests arrive at random, `rate` per second on average, whatever the server does
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import orjson

_FIRST_TOKEN_ID = 100  # below are control tokens, in most vocabularies


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """What to send, and how fast; times are in seconds."""

    url: str
    """Root of the server, such as http://127.0.0.1:8000."""
    model: str
    num_requests: int = 64
    concurrency: int | None = 8
    """Clients of the closed loop; None with `rate`."""
    rate: float | None = None
    """Arrivals per second of the open loop; None with `concurrency`."""
    input_tokens: int = 256
    output_tokens: int = 64
    shared_prefix_tokens: int = 0
    """Of the input, tokens that all prompts begin with."""
    prompt_kind: Literal["tokens", "text"] = "tokens"
    """text: for servers that take no token ids; lengths are then approximate."""
    vocab_size: int = 30_000
    """Token ids are drawn below it."""
    temperature: float = 0.0
    seed: int = 0
    warmup_requests: int = 2
    """Sent first, one after the other, and not counted."""
    timeout_s: float = 600.0
    """For one request."""
    api_key: str | None = field(default=None, repr=False)


@dataclass(slots=True)
class RequestTimes:
    """What one request saw; clocks are time.perf_counter()."""

    sent_s: float
    piece_s: list[float] = field(default_factory=list)
    """When each piece of output came; a piece is one token, unless the server groups them."""
    ended_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """From sending to the first piece."""
        return self.piece_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two."""
        if self.num_output_tokens < 2:
            return None
        return (self.piece_s[-1] - self.piece_s[0]) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From sending to the last byte."""
        return self.ended_s - self.sent_s

    @property
    def itl_s(self) -> list[float]:
        """Gaps between pieces."""
        return [b - a for a, b in zip(self.piece_s, self.piece_s[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Everything measured."""

    requests: Sequence[RequestTimes]
    duration_s: float
    """From the first request sent to the last one ended."""

    @classmethod
    def of_part(cls, requests: Sequence[RequestTimes]) -> "LoadResult":
        """What had ended when a load was broken off."""
        sent = [request.sent_s for request in requests]
        ended = [request.ended_s for request in requests]
        return cls(requests, max(ended) - min(sent) if requests else 0.0)


Watch = Callable[[RequestTimes], None]
"""Called with each request that has ended, those of the warm-up left out."""


def _nobody(_: RequestTimes) -> None:
    pass


async def run_load(config: LoadConfig, watch: Watch = _nobody) -> LoadResult:
    """Send the load; a request that fails is a result too."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    # NOTE: trust_env off: a proxy in the environment must not stand between us and the server.
    async with httpx.AsyncClient(
        base_url=_root(config.url),
        limits=limits,
        headers=headers,
        timeout=httpx.Timeout(config.timeout_s, connect=10.0),
        trust_env=False,
    ) as client:
        prompts = _prompts(config)
        for _ in range(config.warmup_requests):
            await _request(client, config, next(prompts))
        started_s = time.perf_counter()
        if config.rate is None:
            results = await _closed_loop(client, config, prompts, watch)
        else:
            results = await _open_loop(client, config, prompts, watch)
        return LoadResult(results, time.perf_counter() - started_s)


async def _closed_loop(
    client: httpx.AsyncClient, config: LoadConfig, prompts: Iterator[Any], watch: Watch
) -> list[RequestTimes]:
    todo = [next(prompts) for _ in range(config.num_requests)]
    results: list[RequestTimes] = []

    async def run_client() -> None:
        while todo:
            results.append(await _request(client, config, todo.pop(), watch))

    async with asyncio.TaskGroup() as group:
        for _ in range(config.concurrency or 1):
            group.create_task(run_client())
    return results


async def _open_loop(
    client: httpx.AsyncClient, config: LoadConfig, prompts: Iterator[Any], watch: Watch
) -> list[RequestTimes]:
    assert config.rate is not None
    arrivals = random.Random(config.seed)
    loop = asyncio.get_running_loop()
    at_s = loop.time()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for _ in range(config.num_requests):
            # Absolute times: a late wake-up does not lower the rate.
            await asyncio.sleep(at_s - loop.time())
            tasks.append(group.create_task(_request(client, config, next(prompts), watch)))
            at_s += arrivals.expovariate(config.rate)
    return [task.result() for task in tasks]


async def _request(
    client: httpx.AsyncClient, config: LoadConfig, prompt: Any, watch: Watch = _nobody
) -> RequestTimes:
    body = {
        "model": config.model,
        "prompt": prompt,
        "max_tokens": config.output_tokens,
        "temperature": config.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    times = RequestTimes(sent_s=time.perf_counter())
    try:
        async with asyncio.timeout(config.timeout_s):
            await _stream(client, body, times)
    except (httpx.HTTPError, TimeoutError, ValueError, KeyError) as error:
        times.error = f"{type(error).__name__}: {error}"
    times.ended_s = time.perf_counter()
    if not times.piece_s and not times.error:
        times.error = "no output"
    watch(times)
    return times


async def _stream(client: httpx.AsyncClient, body: dict[str, Any], times: RequestTimes) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            text = (await reply.aread()).decode(errors="replace")
            times.error = f"status {reply.status_code}: {text[:200]}"
            return
        is_done = False
        async for line in reply.aiter_lines():
            if not line.startswith("data:"):
                continue
            data = line[5:].strip()
            if data == "[DONE]":
                is_done = True
                continue
            _take(orjson.loads(data), times)
        if not is_done and not times.error:
            times.error = "the stream broke off"


def _take(event: dict[str, Any], times: RequestTimes) -> None:
    if "error" in event:
        times.error = f"in the stream: {str(event['error'])[:200]}"
        return
    usage = event.get("usage")
    if event.get("choices"):
        times.piece_s.append(time.perf_counter())
        if not usage:
            times.num_output_tokens += 1
    if usage:
        times.num_prompt_tokens = usage["prompt_tokens"]
        times.num_output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        times.num_cached_tokens = details.get("cached_tokens") or 0


def _prompts(config: LoadConfig) -> Iterator[list[int] | str]:
    """Endless random prompts of the same length, equal for equal seeds."""
    generator = random.Random(config.seed)

    def draw(number: int) -> list[int]:
        return [generator.randrange(_FIRST_TOKEN_ID, config.vocab_size) for _ in range(number)]

    prefix = draw(min(config.shared_prefix_tokens, config.input_tokens))
    while True:
        token_ids = prefix + draw(config.input_tokens - len(prefix))
        # As text: a letter after a space is one token in any vocabulary we know.
        letters = (chr(ord("a") + token_id % 26) for token_id in token_ids)
        yield token_ids if config.prompt_kind == "tokens" else " ".join(letters)


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
