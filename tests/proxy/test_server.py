"""The process: configuration, ports, signals, metrics and status."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from proxy.config import Limits, ProxyConfig
from tests.proxy.conftest import MODEL, StandFactory

ROOT = Path(__file__).parents[2]


def test_the_configuration_survives_json() -> None:
    config = ProxyConfig(
        model_path="/m",
        served_model_names=("a", "b"),
        controller_address="c:1",
        limits=Limits(max_n=3),
    )
    assert ProxyConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="nonsense"):
        ProxyConfig.from_json(json.dumps({**json.loads(config.to_json()), "nonsense": 1}))


@contextmanager
def process(gguf_path: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    config = ProxyConfig(
        http_port=0,
        grpc_port=0,
        model_path=str(gguf_path),
        served_model_names=(MODEL,),
        controller_address="127.0.0.1:1",
        worker_wait_s=0.1,
    )
    (folder / "proxy.json").write_text(config.to_json())
    ports = folder / "ports.json"
    command = [sys.executable, "-m", "proxy", "--config", str(folder / "proxy.json")]
    with subprocess.Popen(
        [*command, "--ports-file", str(ports)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as running:
        try:
            deadline = time.monotonic() + 30
            while not ports.exists():
                assert running.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield running, json.loads(ports.read_text())["http_port"]
        finally:
            running.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_quietly_with_zero(
    gguf_path: Path, tmp_path: Path, number: int
) -> None:
    with process(gguf_path, tmp_path) as (running, port):
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
        assert httpx.get(f"{url}/ready", trust_env=False).status_code == 503
        body = {"prompt": "a"}
        refused = httpx.post(f"{url}/v1/completions", json=body, trust_env=False)
        assert refused.status_code == 503
        os.kill(running.pid, number)
        assert running.wait(10) == 0
        assert running.stdout is not None
        assert running.stdout.read() == b""


def test_the_proxy_imports_nothing_heavy() -> None:
    code = (
        "import sys, proxy.__main__; "
        "print([m for m in ('torch', 'ray', 'engine', 'kvtransfer', 'kernels', 'pdserve') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


async def test_requests_that_outlast_the_grace_are_told(stand: StandFactory) -> None:
    async with stand() as proxy:
        proxy.decoders[0].behavior.token_delay_s = 0.02
        body = {"prompt": "a", "max_tokens": 5000}
        whole = asyncio.create_task(proxy.http.post("/v1/completions", json=body))
        streamed = asyncio.create_task(
            proxy.http.post("/v1/completions", json={**body, "stream": True})
        )
        await proxy.until(lambda: len(proxy.decoders[0].held) == 2)
        proxy.server.stop()
        reply = await asyncio.wait_for(whole, 10)
        assert reply.status_code == 503
        assert "retry-after" in reply.headers
        *_, last = [line[6:] for line in (await streamed).text.splitlines() if line]
        assert json.loads(last)["error"] == reply.json()["error"]
        await proxy.until(lambda: not proxy.decoders[0].held)


async def test_metrics_and_status_show_workers_and_requests(stand: StandFactory) -> None:
    async with stand() as proxy:
        body = {"model": MODEL, "prompt": "The lighthouse stood", "max_tokens": 4}
        assert (await proxy.http.post("/v1/completions", json=body)).status_code == 200
        assert (await proxy.http.post("/v1/completions", json={})).status_code == 400
        await proxy.until_idle()
        text = (await proxy.http.get("/metrics")).text
        model = f'model_name="{MODEL}"'
        for line in (
            'pdserve_requests_total{api="completions",status="200"} 1.0',
            'pdserve_requests_total{api="completions",status="400"} 1.0',
            f'pdserve_kv_blocks_held{{engine_id="decode-0",{model},role="decoder"}} 0.0',
            f'pdserve_leases{{engine_id="prefill-0",{model},role="prefiller"}} 0.0',
            "pdserve_proxy_inflight_requests 0.0",
            "pdserve_proxy_keys_pending_release 0.0",
            f'vllm:time_to_first_token_seconds_count{{{model},role="proxy"}} 1.0',
            f'vllm:inter_token_latency_seconds_count{{{model},role="proxy"}} 3.0',
        ):
            assert line in text, line
        assert 'pdserve_kv_transfer_blocks_total{engine_id="decode-0"' in text
        status = (await proxy.http.get("/pdserve/status")).json()
        assert status["ready"]
        assert status["num_inflight_requests"] == 0
        roles = {worker["engine_id"]: worker["role"] for worker in status["workers"]}
        assert roles == {"prefill-0": "prefiller", "decode-0": "decoder"}
        assert (await proxy.http.get("/version")).json()["version"]


def _first_bytes(port: int, pieces: Iterable[bytes]) -> bytes:
    """What the proxy answers while it is still being sent to."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        with contextlib.suppress(ConnectionError):
            return connection.recv(64)
    return b"reset"


def test_a_head_without_end_is_refused_before_it_costs_memory_or_time(
    gguf_path: Path, tmp_path: Path
) -> None:
    begin = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    chunked = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
    piece = b"a" * 8192
    heads = {
        "small": ((begin, b"X: ", piece, b"\r\n\r\n"), {b"HTTP/1.1 200"}),
        "one header": ((begin, b"X: ", *[piece] * 64), {b"HTTP/1.1 431", b"reset"}),
        "many": ((begin, *[b"X: " + piece + b"\r\n"] * 64), {b"HTTP/1.1 431", b"reset"}),
        "url": ((b"GET /", *[piece] * 64), {b"HTTP/1.1 431", b"reset"}),
        "trailer": ((chunked, b"X: ", *[piece] * 64), {b"HTTP/1.1 431", b"reset"}),
    }
    with process(gguf_path, tmp_path) as (_, port):
        for name, (pieces, expected) in heads.items():
            answer = _first_bytes(port, pieces)
            assert answer[:12] in expected, (name, answer)
        body = {"model": MODEL, "prompt": "a " * 200_000}
        reply = httpx.post(f"http://127.0.0.1:{port}/tokenize", json=body, trust_env=False)
        assert reply.status_code == 200
