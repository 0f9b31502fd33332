"""The whole service without Ray: real workers and a real proxy as processes, membership by hand.

Used by tests that need exact control over who is there, who dies and when.
"""

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx

from engine.worker.config import WorkerConfig
from protos import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from proxy.config import ProxyConfig

ROOT = Path(__file__).parents[2]
TOKEN = "test-cluster-token"
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0
_ROLES = {"prefiller": worker_pb2.ROLE_PREFILLER, "decoder": worker_pb2.ROLE_DECODER}


def wait_until(condition: Any, timeout_s: float, what: str) -> Any:
    """Poll until `condition()` is true; return its value. AssertionError: not in time."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
    return value


class Worker:
    """One worker process."""

    def __init__(self, role: str, config: WorkerConfig) -> None:
        self.role = role
        self.config = config
        self.info: dict[str, Any] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.worker_main", role, config.to_json()],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )

    def wait_ready(self) -> None:
        lines: queue.Queue[bytes] = queue.Queue()
        assert self._process.stdout is not None
        reader = threading.Thread(
            target=lambda out=self._process.stdout: lines.put(out.readline()), daemon=True
        )
        reader.start()
        line = lines.get(timeout=_START_TIMEOUT_S)
        assert line, f"{self.config.engine_id} ended with {self._process.wait(5)}"
        self.info = json.loads(line)
        assert self.info["state"] == "ready", self.info

    @property
    def engine_id(self) -> str:
        return self.config.engine_id

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL, as an out-of-memory killer would."""
        self._process.kill()
        self._process.wait(_STOP_TIMEOUT_S)

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.alive:
            self.resume()
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def stats(self) -> worker_pb2.WorkerStats:
        with grpc.insecure_channel(self.info["address"]) as channel:
            return worker_pb2_grpc.WorkerStub(channel).GetStats(
                worker_pb2.GetStatsRequest(),
                timeout=15,
                metadata=(("x-pdserve-token", TOKEN),),
            )

    def entry(self) -> worker_pb2.WorkerEntry:
        return worker_pb2.WorkerEntry(
            engine_id=self.engine_id,
            incarnation=self.info["incarnation"],
            role=_ROLES[self.role],
            address=self.info["address"],
            state=worker_pb2.WORKER_READY,
            pid=self.info["pid"],
        )


class StaticController(worker_pb2_grpc.ControllerServicer):
    """Serves whatever membership the test sets."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._generation = 0
        self._entries: list[worker_pb2.WorkerEntry] = []
        self._closed = False
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        worker_pb2_grpc.add_ControllerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def set(self, entries: list[worker_pb2.WorkerEntry]) -> None:
        with self._condition:
            self._generation += 1
            self._entries = entries
            self._condition.notify_all()

    def Watch(self, request: Any, context: Any) -> Iterator[worker_pb2.Membership]:
        seen = -1
        while context.is_active():
            with self._condition:
                if self._generation == seen and not self._closed:
                    self._condition.wait(1.0)
                if self._closed:
                    return
                seen = self._generation
                yield worker_pb2.Membership(generation=seen, workers=self._entries)

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._server.stop(0.2).wait(5)


class Service:
    """Workers, controller and proxy; a context manager that leaves no process behind."""

    def __init__(
        self,
        model_path: Path,
        *,
        prefillers: int = 1,
        decoders: int = 1,
        model_name: str = "test-model",
        worker: dict[str, Any] | None = None,
        prefiller: dict[str, Any] | None = None,
        decoder: dict[str, Any] | None = None,
        proxy: dict[str, Any] | None = None,
    ) -> None:
        self._stack = ExitStack()
        self._base = WorkerConfig(
            engine_id="", model_path=str(model_path), model_name=model_name, cluster_token=TOKEN
        )
        self._overrides = {
            "prefiller": {"max_num_seqs": 16, **(worker or {}), **(prefiller or {})},
            "decoder": {"max_prefill_tokens": 64, **(worker or {}), **(decoder or {})},
        }
        self._counts = {"prefiller": prefillers, "decoder": decoders}
        self._proxy_options = proxy or {}
        self._model_path = model_path
        self.model_name = model_name
        self.workers: list[Worker] = []
        self.url = ""
        self.grpc_address = ""

    def __enter__(self) -> "Service":
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.controller = StaticController()
        self._stack.callback(self.controller.close)
        for role, count in self._counts.items():
            for index in range(count):
                self.workers.append(self._spawn(role, index))
        self._start_proxy()
        for worker in self.workers:
            worker.wait_ready()
        self.publish()
        self.wait_ready()

    def _spawn(self, role: str, index: int) -> Worker:
        config = replace(self._base, engine_id=f"{role}-{index}", **self._overrides[role])
        worker = Worker(role, config)
        self._stack.callback(worker.close)
        return worker

    def _start_proxy(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        config = ProxyConfig(
            model_path=str(self._model_path),
            served_model_names=(self.model_name,),
            controller_address=self.controller.address,
            cluster_token=TOKEN,
            **{"http_port": 0, "grpc_port": 0, "local_prefill_tokens": 0, **self._proxy_options},
        )
        (folder / "proxy.json").write_text(config.to_json())
        self.proxy_process = subprocess.Popen(
            [
                *(sys.executable, "-m", "proxy", "--config", str(folder / "proxy.json")),
                *("--ports-file", str(folder / "ports.json")),
            ],
            cwd=ROOT,
        )
        self._stack.callback(self._stop_proxy)
        ports_file = folder / "ports.json"
        wait_until(ports_file.exists, _START_TIMEOUT_S, "the proxy listens")
        ports = json.loads(ports_file.read_text())
        self.url = f"http://127.0.0.1:{ports['http_port']}"
        self.grpc_address = f"127.0.0.1:{ports['grpc_port']}"

    def _stop_proxy(self) -> None:
        self.proxy_process.terminate()
        try:
            self.proxy_process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.proxy_process.kill()
            self.proxy_process.wait(5)

    def publish(self) -> None:
        """Tell the proxy who is there: every live worker."""
        self.controller.set([w.entry() for w in self.workers if w.alive])

    def restart(self, worker: Worker) -> Worker:
        """A new process in the place of a dead one, with the same engine_id."""
        role, index = worker.engine_id.rsplit("-", 1)
        fresh = self._spawn(role, int(index))
        fresh.wait_ready()
        self.workers[self.workers.index(worker)] = fresh
        self.publish()
        return fresh

    def of_role(self, role: str) -> list[Worker]:
        return [w for w in self.workers if w.role == role]

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self) -> None:
        wait_until(self.ready, 60, "the proxy is ready")

    def status(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/pdserve/status", timeout=10).json()

    def metrics(self) -> str:
        """What Prometheus would read."""
        return httpx.get(f"{self.url}/metrics", timeout=10).text

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        body = {"model": self.model_name, "prompt": prompt, "temperature": 0, **options}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=300)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def generate(self, token_ids: list[int], **options: Any) -> list[int]:
        """Greedy output tokens, by the gRPC API."""
        request = inference_pb2.GenerateRequest(
            model=self.model_name,
            token_ids=inference_pb2.TokenIds(ids=token_ids),
            options=inference_pb2.GenerationOptions(temperature=0, **options),
        )
        with grpc.insecure_channel(self.grpc_address) as channel:
            reply = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=300)
        return list(reply.choices[0].token_ids)

    async def generate_all(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy output tokens past any EOS, of all prompts at once."""
        each = (
            asyncio.to_thread(self.generate, prompt, max_tokens=max_tokens, ignore_eos=True)
            for prompt in prompts
        )
        return list(await asyncio.gather(*each))

    def held(self) -> dict[str, tuple[int, int]]:
        """Per live worker: (blocks held, leases) where either is not zero."""
        stats = {w.engine_id: w.stats() for w in self.workers if w.alive}
        return {
            name: (s.num_held_blocks, s.num_leases)
            for name, s in stats.items()
            if s.num_held_blocks or s.num_leases
        }

    def assert_idle(self, timeout_s: float = 5.0) -> None:
        """Nothing is held on any worker within the time that the service promises."""
        deadline = time.monotonic() + timeout_s
        while held := self.held():
            assert time.monotonic() < deadline, f"still held after {timeout_s} s: {held}"
            time.sleep(0.1)
