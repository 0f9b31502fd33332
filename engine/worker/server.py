"""A thread with an asyncio loop that runs a worker's gRPC server."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

_START_TIMEOUT_S = 20.0
_STOP_GRACE_S = 0.5

_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Else a ping follows each message, to measure the connection: a fixed window will do.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class ServerThread:
    """Owns the loop; services are added before `start`, everything ends in `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._server: grpc.aio.Server | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Run a coroutine on the loop from another thread and wait for it.

        Raises: TimeoutError: not done in time.
        """
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def bind(self, host: str) -> int:
        """Create the server on a free port of `host`; return it. `start` makes it answer."""

        async def create() -> int:
            self._server = grpc.aio.server(options=_OPTIONS)
            return self._server.add_insecure_port(f"{host}:0")

        return int(self.call(create(), _START_TIMEOUT_S))

    def start(self, add_services: Callable[[grpc.aio.Server], None]) -> None:
        """Add the services and answer from now on."""

        async def start() -> None:
            assert self._server is not None, "bind() first"
            add_services(self._server)
            await self._server.start()

        self.call(start(), _START_TIMEOUT_S)

    def stop(self) -> None:
        """End the streams after a short grace, then the loop and its thread."""

        async def stop() -> None:
            if self._server is not None:
                await self._server.stop(_STOP_GRACE_S)

        if self._thread.is_alive():
            self.call(stop(), _START_TIMEOUT_S)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_START_TIMEOUT_S)
