"""The reader's side of KV transfer: which reserved blocks a writer may fill, and when they may be
used or reused.

    expect --BeginWrite--> GRANTED --EndWrite(complete)---> VERIFYING --> KVArrived |
    KVFailed(quiet)
       |                      |----EndWrite(incomplete)--------------> KVFailed(quiet) |
       |----link broken--> KVFailed(not quiet) --grace--> KVQuiet |
       +----cancel--> AbortWrite --EndWrite, or link broken and grace--> KVQuiet +--cancel-->
       KVQuiet

Every cancel is followed by exactly one KVQuiet, also for a key that is over or unknown; a KVFailed
that is not quiet is followed by exactly one KVQuiet, whether it is cancelled meanwhile or not.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import grpc

from kvtransfer.checksum import layer_checksum
from kvtransfer.config import KVTransferConfig
from kvtransfer.errors import TransportUnavailable
from kvtransfer.layout import KVLayout
from kvtransfer.link import (
    KVArrived,
    KVFailed,
    KVQuiet,
    ReceiveEvent,
    RequestKey,
    is_authorized,
    key_from_proto,
    key_to_proto,
)
from kvtransfer.registration import KVMemory
from kvtransfer.transports.base import Transport
from kvtransfer.transports.loading import LoadedTransports, load_transports
from protos import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

LANDING_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class ReceiverStats:
    """What the reader holds and what it has seen."""

    num_expected: int
    """Keys that no writer was granted yet."""
    num_granted: int
    """Keys that a writer may write, or whose checksums are being verified."""
    num_quarantined: int
    """Keys that were given up and are not quiet yet."""
    num_quarantined_blocks: int
    num_stale: int
    """Messages that were late, repeated or about an unknown key."""
    num_arrived: int
    failures: dict[str, int]
    """By reason: incomplete, checksum, link."""
    transfers: list[worker_pb2.TransferPeerStats]
    """Per writer."""


class _Writer:
    """One open stream of a writer."""

    def __init__(self, engine_id: str, transport: Transport):
        self.engine_id = engine_id
        self.transport = transport
        self.is_broken = False
        self._loop = asyncio.get_running_loop()
        self._outgoing: asyncio.Queue[worker_pb2.ReaderMessage | None] = asyncio.Queue()

    def send(self, message: worker_pb2.ReaderMessage | None) -> None:
        """Queue a message from any thread; None ends the stream."""
        # A closed loop has no stream left to send on.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._outgoing.put_nowait, message)

    async def next_message(self) -> worker_pb2.ReaderMessage | None:
        """Wait for what send queued."""
        return await self._outgoing.get()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Run callback on the loop of the stream."""
        self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, callback)


@dataclass(slots=True, eq=False)
class _Reservation:
    """Blocks that one key waits for."""

    block_ids: tuple[int, ...]
    writer: _Writer | None = None
    is_cancelled: bool = False
    is_verifying: bool = False
    is_quarantined: bool = False


@dataclass(slots=True)
class _PeerCounters:
    transport: str = ""
    num_transfers: int = 0
    num_blocks: int = 0
    num_failures: int = 0


@dataclass(slots=True)
class _Counters:
    num_stale: int = 0
    num_arrived: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    peers: dict[str, _PeerCounters] = field(default_factory=dict)


class Receiver(worker_pb2_grpc.KVLinkServicer):
    """Servicer of KVLink for a grpc.aio server; the server should be given LINK_OPTIONS.

    on_event is called from the loop of the server or from the thread that verifies checksums, one
    event at a time per key, never with a lock held. It must be cheap and must not raise.
    """

    def __init__(
        self,
        memory: KVMemory,
        *,
        engine_id: str,
        incarnation: int,
        config: KVTransferConfig,
        token: str,
        on_event: Callable[[ReceiveEvent], None],
        transports: LoadedTransports | None = None,
    ):
        """Load the transports of the config, unless given, and register `memory` with them.

        Raises: TransportUnavailable: none can be loaded; says why for each.
        """
        self._memory = memory
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._config = config
        self._token = token
        self._on_event = on_event
        self._transports = transports or load_transports(config, memory)
        self._lock = threading.Lock()
        self._reservations: dict[RequestKey, _Reservation] = {}
        self._writers: set[_Writer] = set()
        self._counters = _Counters()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-verify")
        self._is_closed = False

    def expect(self, key: RequestKey, block_ids: Sequence[int]) -> None:
        """Let one writer fill these blocks, once. Any thread.

        Raises: ValueError: the key is expected already, or a block is out of range.
        """
        for block_id in block_ids:
            if not 0 <= block_id < self._memory.num_blocks:
                raise ValueError(f"block_id is {block_id}, there are {self._memory.num_blocks}")
        with self._lock:
            if key in self._reservations:
                raise ValueError(f"{key} is expected already")
            self._reservations[key] = _Reservation(tuple(block_ids))

    def cancel(self, key: RequestKey) -> None:
        """Give a key up. Any thread; exactly one KVQuiet follows, see the module's docstring."""
        with self._lock:
            if self._is_closed:
                return
            reservation = self._reservations.get(key)
            if reservation is not None and reservation.writer is not None:
                is_first = not reservation.is_cancelled
                reservation.is_cancelled = True
                if is_first and not (reservation.is_verifying or reservation.is_quarantined):
                    abort = worker_pb2.AbortWrite(key=key_to_proto(key))
                    reservation.writer.send(worker_pb2.ReaderMessage(abort=abort))
                return
            self._reservations.pop(key, None)
            self._executor.submit(self._emit, KVQuiet(key))

    def close(self) -> None:
        """Refuse writers, end their streams and all threads. No event follows. Idempotent.

        Comes before the stop of the server, which then has no stream to cut off.
        """
        with self._lock:
            self._is_closed = True
            writers = list(self._writers)
            self._reservations.clear()
        for writer in writers:
            writer.send(None)
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._transports.close()

    def stats(self) -> ReceiverStats:
        """A consistent view. Any thread."""
        block_bytes = self._memory.layout.block_bytes_all_layers
        with self._lock:
            reservations = list(self._reservations.values())
            quarantined = [r for r in reservations if r.is_quarantined or r.is_cancelled]
            return ReceiverStats(
                num_expected=sum(r.writer is None for r in reservations),
                num_granted=sum(r.writer is not None for r in reservations) - len(quarantined),
                num_quarantined=len(quarantined),
                num_quarantined_blocks=sum(len(r.block_ids) for r in quarantined),
                num_stale=self._counters.num_stale,
                num_arrived=self._counters.num_arrived,
                failures=dict(self._counters.failures),
                transfers=[
                    worker_pb2.TransferPeerStats(
                        peer_engine_id=engine_id,
                        transport=peer.transport,
                        num_transfers=peer.num_transfers,
                        num_blocks=peer.num_blocks,
                        num_bytes=peer.num_blocks * block_bytes,
                        num_failures=peer.num_failures,
                    )
                    for engine_id, peer in self._counters.peers.items()
                ],
            )

    @property
    def transport_names(self) -> list[str]:
        """What is loaded here, best first."""
        return self._transports.names

    async def Link(
        self,
        request_iterator: AsyncIterator[worker_pb2.WriterMessage],
        context: "grpc.aio.ServicerContext[worker_pb2.WriterMessage, worker_pb2.ReaderMessage]",
    ) -> AsyncIterator[worker_pb2.ReaderMessage]:
        """Serve one writer until either end closes the stream."""
        if not is_authorized(context.invocation_metadata() or (), self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing cluster token")
        hello = await self._first_message(request_iterator, context)
        answer = self._answer(hello)
        yield worker_pb2.ReaderMessage(hello=answer)
        if answer.refused:
            logger.warning("refused writer %s: %s", hello.engine_id, answer.refused)
            return
        writer = _Writer(hello.engine_id, self._transports.named(answer.endpoint.transport))
        with self._lock:
            peer = self._counters.peers.setdefault(hello.engine_id, _PeerCounters())
            peer.transport = writer.transport.name
            self._writers.add(writer)

        def on_stream_done(_: object) -> None:
            self._break(writer)

        # The stubs declare the callback as a class; any callable will do.
        context.add_done_callback(on_stream_done)  # type: ignore[arg-type]
        reading = asyncio.create_task(self._read(writer, request_iterator))
        try:
            while (message := await writer.next_message()) is not None:
                yield message
        finally:
            reading.cancel()
            self._break(writer)

    async def _first_message(
        self,
        request_iterator: AsyncIterator[worker_pb2.WriterMessage],
        context: "grpc.aio.ServicerContext[worker_pb2.WriterMessage, worker_pb2.ReaderMessage]",
    ) -> worker_pb2.WriterHello:
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                message = await anext(request_iterator)
        except (TimeoutError, StopAsyncIteration):
            message = worker_pb2.WriterMessage()
        if not message.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a link starts with WriterHello")
        return message.hello

    def _answer(self, hello: worker_pb2.WriterHello) -> worker_pb2.ReaderHello:
        layout = self._memory.layout
        answer = worker_pb2.ReaderHello(
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            layouts=[layout.to_proto()],
        )
        layouts = [KVLayout.from_proto(message) for message in hello.layouts]
        try:
            # TODO(#5): reshard where they differ in parallel size or block size.
            if layouts != [layout]:
                raise TransportUnavailable(
                    f"layouts differ: writer has {layouts}, reader has {[layout]}"
                )
            if self._is_closed:
                raise TransportUnavailable("the reader is closing")
            transport = self._choose(hello)
            answer.endpoint.CopyFrom(transport.endpoint())
        except TransportUnavailable as error:
            answer.refused = str(error)
        return answer

    def _choose(self, hello: worker_pb2.WriterHello) -> Transport:
        for name in hello.transports:
            if name in self._transports.names and (
                name != "memory" or hello.host_id == self._transports.host_id
            ):
                logger.info(
                    "KV from %s by %s (writer has %s, reader has %s, %s host)",
                    hello.engine_id,
                    name,
                    list(hello.transports),
                    self._transports.names,
                    "same" if hello.host_id == self._transports.host_id else "another",
                )
                return self._transports.named(name)
        raise TransportUnavailable(
            f"no common transport: writer has {list(hello.transports)} on {hello.host_id}, "
            f"reader has {self._transports.names} on {self._transports.host_id}"
        )

    async def _read(
        self, writer: _Writer, request_iterator: AsyncIterator[worker_pb2.WriterMessage]
    ) -> None:
        try:
            async for message in request_iterator:
                if message.HasField("begin"):
                    self._begin(writer, key_from_proto(message.begin.key))
                elif message.HasField("end"):
                    self._end(writer, message.end)
        finally:
            writer.send(None)

    def _begin(self, writer: _Writer, key: RequestKey) -> None:
        with self._lock:
            reservation = self._reservations.get(key)
            reason = ""
            if writer.is_broken:
                return
            if reservation is None:
                reason = "these blocks are not expected (any more)"
            elif reservation.writer is writer:
                # A repeated message; the grant it asks for is on its way.
                self._counters.num_stale += 1
                return
            elif reservation.writer is not None:
                reason = "another writer has the grant"
            else:
                reservation.writer = writer
            self._counters.num_stale += bool(reason)
        grant = worker_pb2.WriteGrant(key=key_to_proto(key), granted=not reason, reason=reason)
        writer.send(worker_pb2.ReaderMessage(grant=grant))

    def _end(self, writer: _Writer, end: worker_pb2.EndWrite) -> None:
        key = key_from_proto(end.key)
        with self._lock:
            reservation = self._reservations.get(key)
            if (
                reservation is None
                or reservation.writer is not writer
                or reservation.is_verifying
                or reservation.is_quarantined
            ):
                self._counters.num_stale += 1
                return
            if end.complete and not reservation.is_cancelled:
                reservation.is_verifying = True
                self._executor.submit(self._verify, key, reservation, writer, tuple(end.checksums))
                return
        failure = ("incomplete", f"the writer gave up: {end.error or 'aborted'}")
        self._conclude(key, reservation, writer, failure)

    def _verify(
        self,
        key: RequestKey,
        reservation: _Reservation,
        writer: _Writer,
        checksums: tuple[int, ...],
    ) -> None:
        """Compare what arrived with what was sent; body of the checksum thread."""
        layout = self._memory.layout
        failure = ("", "")
        if checksums and len(checksums) != layout.num_layers:
            failure = ("checksum", f"{len(checksums)} checksums for {layout.num_layers} layers")
        elif self._config.checksum == "full":
            wait_s = (
                0.0 if writer.transport.is_landing_guaranteed else self._config.landing_timeout_s
            )
            deadline_s = time.monotonic() + wait_s
            for layer_idx, checksum in enumerate(checksums):
                while layer_checksum(self._memory, layer_idx, reservation.block_ids) != checksum:
                    if time.monotonic() >= deadline_s:
                        failure = ("checksum", f"checksum of layer {layer_idx} does not match")
                        break
                    time.sleep(LANDING_POLL_S)
                if failure[0] or reservation.is_cancelled:
                    break
        self._conclude(key, reservation, writer, failure)

    def _conclude(
        self,
        key: RequestKey,
        reservation: _Reservation,
        writer: _Writer,
        failure: tuple[str, str],
    ) -> None:
        """The writer is through with the blocks. failure: (kind, reason), empty if they arrived."""
        kind, reason = failure
        with self._lock:
            if self._reservations.get(key) is not reservation:
                return
            del self._reservations[key]
            peer = self._counters.peers[writer.engine_id]
            if reservation.is_cancelled:
                event: ReceiveEvent = KVQuiet(key)
            elif kind:
                self._counters.failures[kind] += 1
                peer.num_failures += 1
                event = KVFailed(key, reason, quiet=True)
            else:
                self._counters.num_arrived += 1
                peer.num_transfers += 1
                peer.num_blocks += len(reservation.block_ids)
                event = KVArrived(key)
        self._emit(event)

    def _break(self, writer: _Writer) -> None:
        """The stream is over: nothing this writer was granted will end with an EndWrite.
        Idempotent.
        """
        failed = []
        with self._lock:
            self._writers.discard(writer)
            if writer.is_broken or self._is_closed:
                return
            writer.is_broken = True
            broken = [
                (key, reservation)
                for key, reservation in self._reservations.items()
                if reservation.writer is writer and not reservation.is_verifying
            ]
            for key, reservation in broken:
                reservation.is_quarantined = True
                if not reservation.is_cancelled:
                    self._counters.failures["link"] += 1
                    self._counters.peers[writer.engine_id].num_failures += 1
                    failed.append(key)
        for key in failed:
            self._emit(KVFailed(key, "the link to the writer broke", quiet=False))
        for key, reservation in broken:
            writer.call_later(
                self._config.quarantine_grace_s, partial(self._release, key, reservation)
            )

    def _release(self, key: RequestKey, reservation: _Reservation) -> None:
        with self._lock:
            if self._reservations.get(key) is not reservation:
                return
            del self._reservations[key]
        self._emit(KVQuiet(key))

    def _emit(self, event: ReceiveEvent) -> None:
        if not self._is_closed:
            self._on_event(event)
