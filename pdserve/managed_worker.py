"""One worker under the controller's care.

STARTING --info: ready--> READY --drain()--> DRAINING --idle or grace over--> gone
    ^                       |
    |--- process died ------+   Ray restarts it at once, with a new incarnation
FAILED <-- could not start, or died several times in a row; started anew after a backoff
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress

import grpc

from pdserve.actors import ActorDead, ActorLost, Info, RayWorker, RayWorkers
from pdserve.controller_config import ControllerConfig, Role
from pdserve.wire import insecure_channel, token_metadata
from protos import worker_pb2, worker_pb2_grpc

ROLE_TO_PROTO = {
    "prefiller": worker_pb2.ROLE_PREFILLER,
    "decoder": worker_pb2.ROLE_DECODER,
}
_READY_STATES = (worker_pb2.WORKER_READY, worker_pb2.WORKER_DRAINING)
_STATS_TIMEOUT_S = 1.0
_LATE_S = 1.0
_NOBODY_LISTENS, _UNKNOWN = -1, -2

_log = logging.getLogger(__name__)


class ManagedWorker:
    """Creates or adopts an actor, follows its state and replaces it when it fails.

    `run` until `drain` has ended it; `on_change` is called after each change of `entry`.
    """

    def __init__(
        self,
        config: ControllerConfig,
        workers: RayWorkers,
        role: Role,
        index: int,
        config_json: str,
        on_change: Callable[[], None],
    ) -> None:
        self.role = role
        self.index = index
        self.name = f"{config.service}-{role}-{index}"
        self.is_draining = False
        self.entry = worker_pb2.WorkerEntry(
            engine_id=f"{role}-{index}",
            role=ROLE_TO_PROTO[role],
            state=worker_pb2.WORKER_STARTING,
            phase="starting process",
        )
        self._config = config
        self._workers = workers
        self._config_json = config_json
        self._on_change = on_change
        self._actor: asyncio.Task[RayWorker] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._break: asyncio.Task[None] | None = None
        self._num_failures = 0
        self._ready_since_s = 0.0
        self._info_task: asyncio.Task[Info] | None = None

    async def run(self) -> None:
        """Keep the worker alive; ends only by cancellation."""
        try:
            while True:
                error = await self._live()
                await self._kill()
                delay_s = self._backoff_s()
                _log.warning("%s failed, next try in %.0f s: %s", self.name, delay_s, error)
                self._update(
                    state=worker_pb2.WORKER_FAILED, error=error, phase="failed", address="", pid=0
                )
                await asyncio.sleep(delay_s)
                self._update(
                    state=worker_pb2.WORKER_STARTING, phase="starting process", progress=0.0
                )
        finally:
            await self._close_channel()

    async def drain(self, grace_s: float) -> None:
        """Give its requests time to end, without new ones."""
        self.is_draining = True
        if self.entry.state == worker_pb2.WORKER_READY:
            self._update(state=worker_pb2.WORKER_DRAINING, phase="draining")
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.sleep(self._config.drain_settle_s)
                    while await self._num_leases() not in (0, _NOBODY_LISTENS):
                        await asyncio.sleep(0.1)

    async def end(self) -> None:
        """Stop it in order, then kill its process."""
        if self._actor is not None:
            with suppress(TimeoutError, ValueError, RuntimeError):
                async with asyncio.timeout(self._config.stop_timeout_s):
                    await (await asyncio.shield(self._actor)).stop()
        await self._kill()

    async def _live(self) -> str:
        """Follow one actor until it needs to be replaced; returns why."""
        role = self._config.role(self.role)
        try:
            self._actor = asyncio.create_task(
                self._workers.create(self.name, role, self._config_json)
            )
            # NOTE: shielded: what was begun must be known when it has to be killed.
            actor = await asyncio.shield(self._actor)
        except (ValueError, RuntimeError) as error:
            return f"cannot be created: {error}"
        clock = asyncio.get_running_loop()
        silent_since_s = clock.time()
        was_alive = False
        while True:
            try:
                info = await self._ask(actor)
            except ActorDead as error:
                return str(error)
            except ActorLost as error:
                if was_alive and not self._survives_death(str(error)):
                    return f"ended {self._num_failures} times in a row: {error}"
                was_alive = False
                silent_since_s = clock.time()
            else:
                if info is None:
                    reason = self._check_silence(clock.time() - silent_since_s, was_alive)
                    if reason:
                        return reason
                else:
                    was_alive, silent_since_s = True, clock.time()
                    if info["state"] in ("failed", "stopped"):
                        return str(info["error"]) or f"is {info['state']}"
                    self._adopt(info)
            await self._pause(actor)

    async def _ask(self, actor: RayWorker) -> Info | None:
        """Its state, or None if it does not answer now; the question then stays open."""
        if self._info_task is None:
            self._info_task = asyncio.ensure_future(actor.info())
        await asyncio.wait({self._info_task}, timeout=_LATE_S)
        if not self._info_task.done():
            return None
        task, self._info_task = self._info_task, None
        return task.result()

    def _adopt(self, info: Info) -> None:
        is_ready = info["state"] == "ready"
        is_new = self.entry.incarnation != info["incarnation"]
        if is_new and self.entry.incarnation:
            self.entry.num_restarts += 1
        now_s = asyncio.get_running_loop().time()
        if is_new or not is_ready:
            self._ready_since_s = now_s
        if now_s - self._ready_since_s >= self._config.stable_s:
            self._num_failures = 0
        ready = worker_pb2.WORKER_DRAINING if self.is_draining else worker_pb2.WORKER_READY
        self._update(
            incarnation=info["incarnation"],
            address=info["address"] if is_ready else "",
            state=ready if is_ready else worker_pb2.WORKER_STARTING,
            phase=info["phase"],
            progress=info["progress"],
            pid=info["pid"],
            node=info["node"],
            error="",
        )

    def _survives_death(self, reason: str) -> bool:
        """Count a death of the process; false when it dies too often to let Ray go on at once."""
        self._num_failures += 1
        _log.warning("%s died (%d in a row): %s", self.name, self._num_failures, reason)
        self._take_out("restarting")
        return self._num_failures <= self._config.max_quick_deaths

    def _take_out(self, phase: str) -> None:
        self._update(state=worker_pb2.WORKER_STARTING, phase=phase, progress=0.0, address="", pid=0)

    def _check_silence(self, silent_s: float, was_alive: bool) -> str:
        """Take a silent worker out of service; returns why it has to be replaced, if so."""
        config = self._config
        limit_s = config.kill_after_s if was_alive else config.start_timeout_s
        if silent_s >= limit_s:
            self._kill_process()
            return f"did not answer for {limit_s:.0f} s"
        if was_alive and silent_s >= config.silence_s and self.entry.state in _READY_STATES:
            self._update(state=worker_pb2.WORKER_STARTING, phase="not answering", progress=0.0)
        return ""

    def _kill_process(self) -> None:
        # NOTE: a process that hangs does not hear Ray; one that is stopped dies by the kernel only.
        if self.entry.pid and self._config.worker_host:
            with suppress(ProcessLookupError):
                os.kill(self.entry.pid, signal.SIGKILL)

    async def _pause(self, actor: RayWorker) -> None:
        """Wait for the next answer, not much longer than it should take.

        A ready worker's broken connection ends the wait.
        """
        if self.entry.state not in _READY_STATES:
            await self._close_channel()
            await asyncio.sleep(self._config.starting_poll_s)
            return
        timeout_s = _LATE_S
        if self._info_task is None:
            timeout_s += self._config.poll_s
            self._info_task = asyncio.ensure_future(actor.info(self._config.poll_s))
        if self._break is None:
            self._break = asyncio.create_task(_broken(self._open_channel()))
        # NOTE: one watch over many pauses: gRPC keeps one that is cancelled until the channel ends.
        await asyncio.wait(
            {self._break, self._info_task},
            timeout=timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._break.done():
            self._break = None
            await self._check_connection()

    async def _check_connection(self) -> None:
        """After a break: drop the worker at once if nobody listens any more; Ray tells later."""
        if await self._num_leases() == _NOBODY_LISTENS:
            self._take_out("restarting")

    async def _num_leases(self) -> int:
        """Requests that it still keeps; _NOBODY_LISTENS, or _UNKNOWN if it does not say."""
        try:
            async with insecure_channel(self.entry.address) as channel:
                stats = await worker_pb2_grpc.WorkerStub(channel).GetStats(
                    worker_pb2.GetStatsRequest(),
                    metadata=token_metadata(self._config.token),
                    timeout=_STATS_TIMEOUT_S,
                )
        except grpc.aio.AioRpcError as error:
            is_gone = error.code() == grpc.StatusCode.UNAVAILABLE
            return _NOBODY_LISTENS if is_gone else _UNKNOWN
        return stats.num_leases

    def _open_channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = insecure_channel(self.entry.address)
        return self._channel

    async def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if self._break is not None:
            self._break.cancel()
            self._break = None
        if channel is not None:
            await channel.close()

    async def _kill(self) -> None:
        if self._info_task is not None:
            self._info_task.cancel()
            self._info_task = None
        task, self._actor = self._actor, None
        if task is not None:
            with suppress(ValueError, RuntimeError):  # it could not be created
                await (await task).kill()

    def _backoff_s(self) -> float:
        self._num_failures += 1
        exponent = min(self._num_failures - 1, 16)
        return min(self._config.backoff_min_s * 2.0**exponent, self._config.backoff_max_s)

    def _update(self, **values: object) -> None:
        before = worker_pb2.WorkerEntry()
        before.CopyFrom(self.entry)
        for name, value in values.items():
            setattr(self.entry, name, value)
        if self.entry != before:
            self._on_change()


async def _broken(channel: grpc.aio.Channel) -> None:
    """Return once the channel was connected and is no more, or cannot be."""
    while (state := channel.get_state(try_to_connect=True)) in (
        grpc.ChannelConnectivity.IDLE,
        grpc.ChannelConnectivity.CONNECTING,
        grpc.ChannelConnectivity.READY,
    ):
        await channel.wait_for_state_change(state)
        if state == grpc.ChannelConnectivity.READY:
            return
