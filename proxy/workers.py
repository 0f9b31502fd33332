"""The workers of the service, as the controller names them, and one session to each.

    Membership entry READY or DRAINING -> Link: dial -> session -> broken -> short pause -> dial ...
    entry gone or FAILED               -> not dialled again; a working session may finish

The last membership stays in use while the controller is away.
"""

import asyncio
import logging
import random
from dataclasses import dataclass, field

import grpc

from protos import worker_pb2, worker_pb2_grpc
from protos.block_hash import kv_identity
from proxy.adapters import Adapters
from proxy.config import ProxyConfig
from proxy.prefix_index import PrefixIndex
from proxy.router import WorkerSnapshot
from proxy.session import (
    CHANNEL_OPTIONS,
    Identity,
    SessionBroken,
    SessionCounters,
    WorkerSession,
    raise_if_cancelled,
    token_metadata,
)

logger = logging.getLogger(__name__)

_DIALLED_STATES = (worker_pb2.WORKER_READY, worker_pb2.WORKER_DRAINING)


@dataclass(slots=True, eq=False)
class Link:
    """One incarnation of a worker and the session to it, if any."""

    entry: worker_pb2.WorkerEntry
    session: WorkerSession
    is_wanted: bool = True
    """Named by the membership; else it only finishes what it has."""
    task: asyncio.Task[None] | None = None

    @property
    def is_draining(self) -> bool:
        """Takes no new work."""
        return not self.is_wanted or self.entry.state == worker_pb2.WORKER_DRAINING


@dataclass(slots=True, eq=False)
class WorkerPool:
    """Follow the membership and keep a session to every worker in it; `run` until cancelled."""

    config: ProxyConfig
    proxy_id: str
    adapters: Adapters
    index: PrefixIndex = field(default_factory=PrefixIndex)
    """Follows what every worker says that it holds."""
    generation: int = -1
    has_controller: bool = False
    links: dict[Identity, Link] = field(default_factory=dict)
    counters: SessionCounters = field(default_factory=SessionCounters)
    """Of all sessions there ever were: a counter must not fall when a worker goes."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Watch the controller for ever; on cancellation every session is closed."""
        try:
            pause_s = self.config.reconnect_min_s
            while True:
                try:
                    await self._watch()
                except (grpc.aio.AioRpcError, TimeoutError, OSError) as error:
                    raise_if_cancelled()
                    if self.has_controller:
                        logger.warning("controller is away: %s", error)
                    pause_s = self.config.reconnect_min_s if self.has_controller else pause_s
                self.has_controller = False
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(pause_s * 2, self.config.reconnect_max_s)
        finally:
            await self._close()

    def session(self, identity: Identity) -> WorkerSession:
        """The current session of a worker from a snapshot."""
        return self.links[identity].session

    def snapshots(self) -> list[WorkerSnapshot]:
        """Every worker that can be given work, or is draining, right now."""
        return [
            snapshot(link.session, is_draining=link.is_draining)
            for link in self.links.values()
            if link.session.is_usable
        ]

    def has_ready(self, role: "worker_pb2.Role.ValueType") -> bool:
        """Whether new work can be given to some worker of this role."""
        return any(worker.role == role and not worker.is_draining for worker in self.snapshots())

    @property
    def max_model_len(self) -> int:
        """Smallest context among connected decoders; 0 when none is connected."""
        lengths = [
            hello.max_model_len
            for link in self.links.values()
            if link.session.is_usable
            and (hello := link.session.hello) is not None
            and hello.role == worker_pb2.ROLE_DECODER
            and hello.max_model_len
        ]
        return min(lengths, default=0)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return at the next connect, break or membership change, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _watch(self) -> None:
        silence_s = self.config.controller_silence_s
        loop = asyncio.get_running_loop()
        address = self.config.controller_address
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stream = worker_pb2_grpc.ControllerStub(channel).Watch(
                worker_pb2.WatchRequest(proxy_id=self.proxy_id),
                metadata=token_metadata(self.config.cluster_token),
            )
            async with asyncio.timeout(self.config.connect_timeout_s) as silence:
                async for membership in stream:
                    silence.reschedule(loop.time() + silence_s)
                    self.has_controller = True
                    self.apply(membership)

    def apply(self, membership: worker_pb2.Membership) -> None:
        """Adopt a membership; one older than the current is ignored."""
        if membership.generation < self.generation:
            return
        is_new = membership.generation > self.generation
        self.generation = membership.generation
        named = {
            (entry.engine_id, entry.incarnation): entry
            for entry in membership.workers
            if entry.state in _DIALLED_STATES
        }
        for identity, entry in named.items():
            link = self.links.get(identity)
            if link is None:
                self.links[identity] = self._dial(identity, entry)
            else:
                link.entry = entry
                link.is_wanted = True
        for identity, link in list(self.links.items()):
            if identity not in named:
                link.is_wanted = False
                self._prune(identity, link)
        if is_new:
            self._notify()

    def _prune(self, identity: Identity, link: Link) -> None:
        if link.session.is_usable and not link.session.is_idle:
            return
        if link.task is not None:
            link.task.cancel()
        del self.links[identity]

    def _dial(self, identity: Identity, entry: worker_pb2.WorkerEntry) -> Link:
        link = Link(entry, self._session(entry.address, identity))
        link.task = asyncio.create_task(self._maintain(identity, link))
        return link

    async def _maintain(self, identity: Identity, link: Link) -> None:
        pause_s = self.config.reconnect_min_s
        while True:
            try:
                await link.session.run()
            except SessionBroken as error:
                # Redials repeat the same failure many times a second: only its start is news.
                level = logging.WARNING if link.session.hello is not None else logging.INFO
                logger.log(level, "worker %s at %s: %s", identity, link.entry.address, error)
            self._notify()
            if not link.is_wanted:
                self.links.pop(identity, None)
                return
            if link.session.hello is not None:
                pause_s = self.config.reconnect_min_s
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, self.config.reconnect_max_s)
            link.session = self._session(link.entry.address, identity)

    def _session(self, address: str, identity: Identity) -> WorkerSession:
        return WorkerSession(
            address,
            identity,
            self.config,
            self.counters,
            on_greeted=self._notify,
            first_messages=self.adapters.messages,
            on_adapter=self.adapters.changed,
            index=self.index,
        )

    def connected(self) -> list[WorkerSession]:
        """Sessions to all workers that can be given work, or are draining."""
        return [link.session for link in self.links.values() if link.session.is_usable]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _close(self) -> None:
        tasks = [link.task for link in self.links.values() if link.task is not None]
        self.links.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def snapshot(session: WorkerSession, *, is_draining: bool) -> WorkerSnapshot:
    """Freeze what the router needs from a greeted session."""
    assert session.hello is not None
    stats = session.stats or worker_pb2.WorkerStats()
    num_blocks = session.hello.num_blocks or 1
    return WorkerSnapshot(
        identity=session.identity,
        role=session.hello.role,
        is_draining=is_draining,
        num_active=max(session.num_active, stats.num_running + stats.num_waiting),
        num_pending_tokens=max(session.pending_tokens, stats.num_pending_tokens),
        kv_usage=min(1.0, stats.num_held_blocks / num_blocks),
        block_size=session.hello.layout.block_size or 32,
        max_model_len=session.hello.max_model_len,
        kv_identity=kv_identity(session.hello.model, session.hello.layout),
    )
