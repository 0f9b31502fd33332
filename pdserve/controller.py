"""Keeps the number of workers as asked, and tells everyone who they are.

Scale --> desired --> reconcile --> ManagedWorker x n --> Membership (generation grows) --> Watch

The controller keeps no state that it could not lose: after a restart it finds its workers by name
in Ray, and the desired numbers in a file.
"""

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import ray
from ray.exceptions import RayError

from engine.worker.config import WorkerConfig
from pdserve.actors import RayWorkers
from pdserve.controller_config import ROLES, ControllerConfig, Role
from pdserve.managed_worker import ManagedWorker
from pdserve.wire import has_token
from protos import worker_pb2, worker_pb2_grpc
from proxy.ticks import until_tick_s

_MAX_REPLICAS = 1024
_RESTART_PAUSE_S = 1.0
_ADOPT_TIMEOUT_S = 1.0
_REST_S = 10.0
_GOODBYE_S = 0.5

_log = logging.getLogger(__name__)

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Controller:
    """The desired numbers, the workers, and the gRPC service over both; one event loop."""

    def __init__(
        self,
        config: ControllerConfig,
        stopping: asyncio.Event,
        unwatched: threading.Event,
        rest: Callable[[float], Awaitable[None]],
    ) -> None:
        """stopping: set from outside, it ends `run`; unwatched: set while nobody watches; rest:
        calls `ControllerActor.rest`.
        """
        self._config = config
        self._stopping = stopping
        self._ended = asyncio.Event()
        self._unwatched = unwatched
        self._rest = rest
        self._watched = asyncio.Event()
        self._num_watchers = 0
        self._ray = RayWorkers(config.namespace)
        self._desired_path = Path(config.desired_path)
        self._workers: dict[tuple[Role, int], ManagedWorker] = {}
        self._tasks: dict[tuple[Role, int], asyncio.Task[None]] = {}
        self._draining: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        # NOTE: from the clock, so that it grows over restarts: they take longer than a change does.
        self._generation = time.time_ns() // 1_000_000
        self.desired: dict[Role, int] = {role: config.role(role).replicas for role in ROLES}

    async def run(self) -> None:
        """Serve until `stop`, then end every worker."""
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0), ("grpc.http2.bdp_probe", 0)))
        worker_pb2_grpc.add_ControllerServicer_to_server(_Service(self), server)
        address = f"{self._config.host}:{self._config.port}"
        if not server.add_insecure_port(address):
            raise OSError(f"cannot bind {address}")
        self._load_desired()
        await self._adopt()
        await self._hear_adopted()
        self._reconcile(self._config.drain_grace_s)
        await server.start()
        _log.info("controller serves at %s", address)
        resting = asyncio.create_task(self._keep_resting())
        try:
            await self._stopping.wait()
        finally:
            resting.cancel()
            await self._end_all()
            self._ended.set()
            await server.stop(_GOODBYE_S)

    async def stop(self) -> None:
        """End every worker; returns when they have stopped and are being killed."""
        self._stopping.set()
        await self._ended.wait()

    def status(self) -> worker_pb2.ServiceStatus:
        """Who is there, and how many there should be."""
        return worker_pb2.ServiceStatus(
            membership=self.membership(),
            desired_prefillers=self.desired["prefiller"],
            desired_decoders=self.desired["decoder"],
        )

    def membership(self) -> worker_pb2.Membership:
        """The workers as they are now."""
        entries = [self._workers[key].entry for key in sorted(self._workers)]
        return worker_pb2.Membership(generation=self._generation, workers=entries)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While somebody watches."""
        self._num_watchers += 1
        self._unwatched.clear()
        self._watched.set()
        try:
            yield
        finally:
            self._num_watchers -= 1
            if self._num_watchers == 0:
                self._unwatched.set()
                self._watched.clear()

    async def _keep_resting(self) -> None:
        while True:
            await self._watched.wait()
            await self._rest(_REST_S)

    async def memberships(self) -> AsyncIterator[worker_pb2.Membership]:
        """The current one, then one at each change, and as a heartbeat; for ever."""
        while True:
            changed = self._changed
            yield self.membership()
            with suppress(TimeoutError):
                async with asyncio.timeout(until_tick_s(self._config.heartbeat_s)):
                    await changed.wait()

    def scale(self, desired: dict[Role, int], grace_s: float) -> None:
        """Change how many workers there should be; a worker that has to go gets `grace_s`.

        Raises: OSError: the numbers cannot be noted; nothing has changed.
        """
        wanted = self.desired | desired
        partial = self._desired_path.with_suffix(".partial")
        partial.write_text(json.dumps(wanted))
        partial.replace(self._desired_path)
        self.desired = wanted
        self._reconcile(grace_s)
        self._notify()

    def is_authorized(self, context: _Context) -> bool:
        """Whether a caller knows the cluster's secret."""
        return has_token(context.invocation_metadata(), self._config.token)

    def _load_desired(self) -> None:
        if self._desired_path.is_file():
            saved = json.loads(self._desired_path.read_text())
            self.desired = {role: int(saved[role]) for role in ROLES}

    async def _adopt(self) -> None:
        """Take over the workers of a controller that died."""
        for name in await self._ray.names():
            for role in ROLES:
                index = name.removeprefix(f"{self._config.service}-{role}-")
                if index != name and index.isdecimal():
                    _log.info("adopt %s", name)
                    self._start(role, int(index))

    async def _hear_adopted(self) -> None:
        """Wait a moment for the adopted workers to answer.

        NOTE: else the first membership says that nobody is ready, and proxies drop good workers.
        They rest for as long as the controller that died has asked them to.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.poll_s + _ADOPT_TIMEOUT_S):
                while not all(worker.entry.incarnation for worker in self._workers.values()):
                    await self._changed.wait()

    def _reconcile(self, grace_s: float) -> None:
        for role in ROLES:
            active = [worker for worker in self._of(role) if not worker.is_draining]
            missing = self.desired[role] - len(active)
            for _ in range(missing):
                self._start(role, self._free_index(role))
            for worker in active[self.desired[role] :]:
                worker.is_draining = True
                task = asyncio.create_task(self._remove(worker, grace_s))
                self._draining.add(task)
                task.add_done_callback(self._draining.discard)

    def _of(self, role: Role) -> Iterator[ManagedWorker]:
        """Workers of one role, by index."""
        return (worker for key, worker in sorted(self._workers.items()) if key[0] == role)

    def _free_index(self, role: Role) -> int:
        taken = {worker.index for worker in self._of(role)}
        return next(index for index in range(len(taken) + 1) if index not in taken)

    def _start(self, role: Role, index: int) -> None:
        template = WorkerConfig.from_json(self._config.role(role).worker_json)
        engine_id = f"{role}-{index}"
        config = replace(template, engine_id=engine_id, host=self._config.worker_host)
        worker = ManagedWorker(self._config, self._ray, role, index, config.to_json(), self._notify)
        self._workers[role, index] = worker
        self._tasks[role, index] = asyncio.create_task(worker.run())
        self._notify()

    async def _remove(self, worker: ManagedWorker, grace_s: float) -> None:
        await worker.drain(grace_s)
        key = (worker.role, worker.index)
        await _cancelled(self._tasks.pop(key))
        # NOTE: out of the membership first, so that its end is no news to the proxies.
        worker.entry.state = worker_pb2.WORKER_FAILED
        worker.entry.phase = "stopping"
        self._notify()
        await worker.end()
        del self._workers[key]
        self._notify()

    async def _end_all(self) -> None:
        for task in (*self._draining, *self._tasks.values()):
            await _cancelled(task)
        await asyncio.gather(*(worker.end() for worker in self._workers.values()))
        self._workers.clear()

    def _notify(self) -> None:
        self._generation += 1
        self._changed.set()
        self._changed = asyncio.Event()


class _Service(worker_pb2_grpc.ControllerServicer):
    """The gRPC methods over a Controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: _Context
    ) -> AsyncIterator[worker_pb2.Membership]:
        await self._authorize(context)
        with self._controller.watched():
            async for membership in self._controller.memberships():
                yield membership

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: _Context
    ) -> worker_pb2.ServiceStatus:
        await self._authorize(context)
        return self._controller.status()

    async def Scale(
        self, request: worker_pb2.ScaleRequest, context: _Context
    ) -> worker_pb2.ServiceStatus:
        await self._authorize(context)
        desired: dict[Role, int] = {}
        if request.HasField("prefillers"):
            desired["prefiller"] = request.prefillers
        if request.HasField("decoders"):
            desired["decoder"] = request.decoders
        if desired.get("decoder") == 0:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "decoder is 0: at least 1")
        for role, number in desired.items():
            if number > _MAX_REPLICAS:
                message = f"{role} is {number}: at most {_MAX_REPLICAS}"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        try:
            self._controller.scale(desired, request.grace_ms / 1000)
        except OSError as error:
            message = f"the new numbers cannot be noted: {error}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
        return self._controller.status()

    async def Stop(
        self, request: worker_pb2.StopRequest, context: _Context
    ) -> worker_pb2.StopReply:
        await self._authorize(context)
        await self._controller.stop()
        return worker_pb2.StopReply()

    async def _authorize(self, context: _Context) -> None:
        if not self._controller.is_authorized(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong cluster token")


class ControllerActor:
    """The controller as Ray runs it: a loop on a thread, so that a restart needs no caller."""

    def __init__(self, config_json: str) -> None:
        logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
        self._config = ControllerConfig.from_json(config_json)
        self._runner = asyncio.Runner()
        self._loop = self._runner.get_loop()
        self._stopping = asyncio.Event()
        self._unwatched = threading.Event()
        self._self: Any = ray.get_runtime_context().current_actor
        self._thread = threading.Thread(target=self._main, name="controller", daemon=True)
        self._thread.start()

    def rest(self, duration_s: float) -> None:
        """Sleep while there is a proxy that watches; for the reason see `WorkerActor.info`.

        A service that ends begins with its proxy, so it does not wait for this.
        """
        self._unwatched.wait(duration_s)

    def stop(self, timeout_s: float) -> bool:
        """End every worker; returns whether they are gone within `timeout_s`."""
        with suppress(RuntimeError):  # the loop is closed: stopped already
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            with self._runner as runner:
                rest = partial(_call_rest, self._self)
                controller = Controller(self._config, self._stopping, self._unwatched, rest)
                runner.run(controller.run())
        except Exception:
            # NOTE: exit, so that Ray starts a clean one; pause, so that it is no hot loop.
            _log.exception("controller failed: exiting")
            logging.shutdown()
            time.sleep(_RESTART_PAUSE_S)
            os._exit(1)


async def _call_rest(actor: Any, duration_s: float) -> None:
    """NOTE: no method of the actor: with an asynchronous one Ray would give it an event loop."""
    try:
        await actor.rest.remote(duration_s)
    except RayError as error:
        _log.warning("cannot rest: %s", error)
        await asyncio.sleep(duration_s)


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it is over."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
