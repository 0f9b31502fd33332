"""The load generator against a real HTTP server whose timing is known."""

import asyncio
import math
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import orjson
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pdserve.load import LoadConfig, LoadResult, RequestTimes, run_load
from pdserve.load_report import percentile, report_table, summarize

FIRST_S, STEP_S = 0.05, 0.02


class Server:
    """Answers every completion with max_tokens tokens at a steady pace."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.arrivals_s: list[float] = []
        self.num_running = self.max_running = 0
        self.fail_every = 0
        self.app = FastAPI()
        self.app.post("/v1/completions")(self.complete)

    async def complete(self, request: Request) -> Response:
        self.arrivals_s.append(time.monotonic())
        body = orjson.loads(await request.body())
        self.bodies.append(body)
        if self.fail_every and len(self.bodies) % self.fail_every == 0:
            return JSONResponse({"error": {"message": "full"}}, status_code=429)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, object]) -> AsyncIterator[bytes]:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        number = int(str(body["max_tokens"]))
        await asyncio.sleep(FIRST_S)
        for index in range(number):
            yield b"data: " + orjson.dumps({"choices": [{"text": f"t{index}"}]}) + b"\n\n"
            await asyncio.sleep(STEP_S if index + 1 < number else 0)
        usage = {"prompt_tokens": len(list(body["prompt"])), "completion_tokens": number}  # type: ignore[call-overload]
        yield b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n"
        yield b"data: [DONE]\n\n"
        self.num_running -= 1


@contextmanager
def serving(server: Server) -> Iterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    uvicorn_server = uvicorn.Server(uvicorn.Config(server.app, log_level="warning", ws="none"))
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        uvicorn_server.should_exit = True
        thread.join(10)
        listener.close()


@pytest.fixture
def server() -> Server:
    return Server()


def load(url: str, **changes: object) -> LoadConfig:
    values: dict[str, object] = {
        "url": url,
        "model": "m",
        "num_requests": 8,
        "concurrency": 4,
        "input_tokens": 10,
        "output_tokens": 5,
        "warmup_requests": 0,
    }
    return LoadConfig(**(values | changes))  # type: ignore[arg-type]


async def test_a_closed_loop_keeps_its_concurrency_and_measures_the_servers_times(
    server: Server,
) -> None:
    with serving(server) as url:
        config = load(url)
        result = await run_load(config)
    summary = summarize(config, result, slo_ttft_s=10.0, slo_tpot_s=10.0)
    assert (summary["num_requests"], summary["num_errors"]) == (8, 0)
    assert server.max_running == 4
    assert summary["num_output_tokens"] == 40
    assert summary["num_prompt_tokens"] == 80
    assert FIRST_S <= summary["ttft_s"]["p50"] < FIRST_S + 0.3
    assert STEP_S * 0.9 <= summary["tpot_s"]["p50"] < STEP_S + 0.1
    assert summary["goodput_share"] == 1.0
    assert "8 requests" in str(report_table(summary).title)


async def test_poisson_arrivals_do_not_wait_for_answers(server: Server) -> None:
    with serving(server) as url:
        await run_load(load(url, concurrency=None, rate=100.0, num_requests=30))
    assert server.max_running > 4
    gaps = [b - a for a, b in zip(server.arrivals_s, server.arrivals_s[1:], strict=False)]
    assert sum(gaps) < 2.0


async def test_failed_requests_are_counted_by_cause_and_are_no_goodput(server: Server) -> None:
    server.fail_every = 4
    seen: list[RequestTimes] = []
    with serving(server) as url:
        config = load(url)
        summary = summarize(config, await run_load(config, seen.append), slo_ttft_s=10.0)
    assert len(seen) == 8
    assert summary["num_errors"] == 2
    assert next(iter(summary["errors"])).startswith("status 429")
    assert summary["goodput_share"] == 0.75


async def test_a_server_that_is_not_there_gives_errors_not_an_exception() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = load(f"http://127.0.0.1:{listener.getsockname()[1]}", num_requests=2)
        summary = summarize(config, await run_load(config))
    assert summary["num_errors"] == 2
    assert summary["ttft_s"]["p50"] is None


@pytest.mark.parametrize(("slo", "is_shown"), [(None, False), (2.0, True)])
def test_goodput_is_a_matter_of_an_slo(slo: float | None, is_shown: bool) -> None:
    summary = summarize(load(""), result(), slo_ttft_s=slo)
    assert ("goodput" in str(report_table(summary).title)) == is_shown
    assert (summary["goodput_share"] is not None) == is_shown
    assert (summary["goodput_requests_per_s"] is not None) == is_shown


def result() -> LoadResult:
    return LoadResult([RequestTimes(sent_s=1.0, piece_s=[2.0, 3.0], ended_s=3.0)], 2.0)


def bench(url: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "pdserve", "bench", "--url", url, "--model", "m"]
    return [*command, "--warmup", "0", "--input-tokens", "4", "--output-tokens", "3", *options]


@pytest.mark.parametrize(("fail_every", "number", "status"), [(0, 0, 0), (4, 1, 1), (1, 4, 1)])
def test_bench_ends_with_status_1_if_a_request_failed(
    server: Server, fail_every: int, number: int, status: int
) -> None:
    server.fail_every = fail_every
    with serving(server) as url:
        done = subprocess.run(
            bench(url, "-n", "4"), capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == status
    assert "4 requests in" in done.stdout
    expected = f"error: {number} of 4 requests failed\n" if number else ""
    assert done.stderr == expected


def test_bench_shows_what_it_has_when_it_is_interrupted(server: Server) -> None:
    with serving(server) as url:
        process = subprocess.Popen(
            bench(url, "-n", "1000", "--concurrency", "1"), stdout=subprocess.PIPE, text=True
        )
        while len(server.bodies) < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    number = int(shown.split(" requests in")[0])
    assert 2 <= number < 1000


async def test_prompts_have_the_asked_length_and_prefix_and_repeat_with_the_seed(
    server: Server,
) -> None:
    with serving(server) as url:
        await run_load(load(url, shared_prefix_tokens=6, concurrency=1, num_requests=3))
        await run_load(load(url, shared_prefix_tokens=6, concurrency=1, num_requests=3))
        await run_load(load(url, prompt_kind="text", num_requests=1))
    prompts = [body["prompt"] for body in server.bodies]
    tokens = [prompt for prompt in prompts if isinstance(prompt, list)]
    assert [len(prompt) for prompt in tokens] == [10] * 6
    assert len({tuple(prompt[:6]) for prompt in tokens}) == 1
    assert len({tuple(prompt) for prompt in tokens}) == 3
    assert isinstance(prompts[-1], str)
    assert all(body["ignore_eos"] for body in server.bodies)


def test_percentiles_interpolate_between_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert math.isnan(percentile([], 50))
