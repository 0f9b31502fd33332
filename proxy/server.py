"""The proxy process: sockets, signals, start and orderly end."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from proxy.app import create_app
from proxy.config import ProxyConfig
from proxy.garbage import collect_at_leisure, freeze_started
from proxy.http_protocol import BoundedHttpProtocol, WithoutChunks
from proxy.rpc import RpcServer
from proxy.service import Service
from proxy.ticks import until_tick_s
from proxy.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_TICK_S = 1.0
_SEND_BUFFER_BYTES = 128 * 1024


class _HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers, and with a clock of one tick a second instead of ten."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exiting = asyncio.Event()

    def exit(self) -> None:
        """End `serve` in order."""
        self.should_exit = True
        self._exiting.set()

    async def main_loop(self) -> None:
        """Until `exit`; a tick renews the Date header."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exiting.wait(), until_tick_s(_TICK_S))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class ProxyServer:
    """Both listeners over one Service; `run` until `stop`."""

    def __init__(self, config: ProxyConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self.service = Service(config, tokenizer)
        self._socket = _listen(config)
        self._rpc = RpcServer(self.service)
        self._stopping = asyncio.Event()
        self.http_port: int = self._socket.getsockname()[1]
        self.grpc_port = 0
        self.listening = asyncio.Event()
        """Set once both ports accept connections."""
        self._http = _HttpServer(
            uvicorn.Config(
                WithoutChunks(create_app(self.service)),
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                http=BoundedHttpProtocol,
                ws="none",
                backlog=_BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(config.shutdown_grace_s)),
            )
        )

    def stop(self) -> None:
        """Begin an orderly end: no new connections, a short grace for running requests."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until stopped."""
        self.grpc_port = await self._rpc.start()
        pool = asyncio.create_task(self.service.pool.run())
        http = asyncio.create_task(self._http.serve(sockets=[self._socket]))
        stopping = asyncio.create_task(self._stopping.wait())
        keys = asyncio.create_task(self.service.accounts.follow())
        admission = self.service.admission
        garbage = asyncio.create_task(collect_at_leisure(lambda: admission.num_admitted))
        try:
            while not self._http.started and not http.done():
                await asyncio.sleep(0.005)
            self.listening.set()
            await asyncio.wait({pool, http, stopping}, return_when=asyncio.FIRST_COMPLETED)
            self._http.exit()
            await asyncio.gather(http, self._rpc.stop(self._config.shutdown_grace_s))
            if pool.done():
                pool.result()
        finally:
            for task in (stopping, pool, keys, garbage):
                task.cancel()
            await asyncio.gather(pool, stopping, keys, garbage, return_exceptions=True)

    def write_ports(self, path: Path) -> None:
        """Publish the bound ports, atomically."""
        partial = path.with_name(path.name + ".partial")
        ports = {"http_port": self.http_port, "grpc_port": self.grpc_port, "pid": os.getpid()}
        partial.write_text(json.dumps(ports))
        partial.replace(path)


async def serve(config: ProxyConfig, tokenizer: Tokenizer, ports_file: Path | None) -> None:
    """Run a proxy until SIGTERM or SIGINT.

    Raises: OSError: a port is taken; names it.
    """
    server = ProxyServer(config, tokenizer)
    freeze_started()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    loop.add_signal_handler(signal.SIGHUP, server.service.accounts.reload)
    running = asyncio.create_task(server.run())
    if ports_file is not None:
        listening = asyncio.create_task(server.listening.wait())
        await asyncio.wait({running, listening}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if server.listening.is_set():
            server.write_ports(ports_file)
    await running


def _listen(config: ProxyConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it: a peer that acknowledges nothing for so long is cut off by the
    # kernel, with whatever we still had to send to it.
    timeout_ms = int(config.client_write_timeout_s * 1000)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    # Else the kernel would hold megabytes for every client that stopped reading.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    try:
        listener.bind((config.host, config.http_port))
    except OSError as error:
        listener.close()
        address = f"{config.host}:{config.http_port}"
        raise OSError(f"cannot bind {address} for HTTP: {error.strerror}") from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
