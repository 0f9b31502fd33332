"""The reader's side of KV transfer: which reserved blocks writers may fill, and when they may be
used or reused. One per rank.

    expect --BeginWrite of each writer rank--> granted --EndWrite(complete) of each--> verified
      all ranks verified                     --> KVArrived
      a rank fails, or a checksum differs    --> KVFailed(quiet); others are told to stop, and then
                                                 it is KVFailed(not quiet) ... KVQuiet
      a link breaks                          --> KVFailed(not quiet) --grace--> KVQuiet
      cancel                                 --> AbortWrite --EndWrite, or link broken and grace-->
                                                 KVQuiet

Every cancel is followed by exactly one KVQuiet, also for a key that is over or unknown; a KVFailed
that is not quiet is followed by exactly one KVQuiet, whether it is cancelled meanwhile or not.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc

from kvtransfer.config import KVTransferConfig
from kvtransfer.errors import TransportUnavailable
from kvtransfer.link import (
    ACCEPTED,
    KVArrived,
    KVFailed,
    KVQuiet,
    ReceiveEvent,
    RequestKey,
    is_authorized,
    key_from_proto,
    key_to_proto,
)
from kvtransfer.peers import PeerCounters
from kvtransfer.receiver_stats import Counters, ReceiverStats
from kvtransfer.registration import KVMemory
from kvtransfer.reservation import Part, PartState, Reservation
from kvtransfer.reshard import Placement
from kvtransfer.transports.loading import LoadedTransports, load_transports
from kvtransfer.verification import Verification
from kvtransfer.writer_stream import WriterStream
from protos import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

WITHDRAWN = "withdrawn"


_Reservation = Reservation[WriterStream]
_Part = Part[WriterStream]


class Receiver(worker_pb2_grpc.KVLinkServicer):
    """Servicer of KVLink for a grpc.aio server; the server should be given LINK_OPTIONS.

    on_event is called from the loop of the server or from the thread that verifies checksums, one
    event at a time. It must be cheap, must not raise and must not call `close`.
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
        self._events: deque[ReceiveEvent] = deque()
        self._emit_lock = threading.Lock()
        self._writers: set[WriterStream] = set()
        self._counters = Counters()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-verify")
        self._is_closed = False

    def expect(
        self,
        key: RequestKey,
        block_ids: Sequence[int],
        *,
        first_block: int = 0,
        num_tokens: int = 0,
    ) -> None:
        """Let the ranks of one writer fill these blocks, once. Any thread.

        The rest is as in the KVTarget that the writer is given. Raises: ValueError: the key is
        expected already, or a block is out of range.
        """
        for block_id in block_ids:
            if not 0 <= block_id < self._memory.num_blocks:
                raise ValueError(f"block_id is {block_id}, there are {self._memory.num_blocks}")
        with self._lock:
            if key in self._reservations:
                raise ValueError(f"{key} is expected already")
            self._reservations[key] = _Reservation(tuple(block_ids), first_block, num_tokens)

    def cancel(self, key: RequestKey) -> None:
        """Give a key up. Any thread; exactly one KVQuiet follows, see the module's docstring."""
        with self._lock:
            if self._is_closed:
                return
            reservation = self._reservations.get(key)
            if reservation is not None and not reservation.is_quiet:
                if not reservation.is_ended:
                    self._abort_others(key, reservation)
                reservation.is_cancelled = True
                return
            self._reservations.pop(key, None)
            self._events.append(KVQuiet(key))
            self._executor.submit(self._emit)

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
        with self._lock:
            return self._counters.report(self._reservations.values())

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
        # The writer says hello when it has this: a write to a call that ended hides why it did.
        await context.send_initial_metadata(ACCEPTED)
        hello = await self._first_message(request_iterator, context)
        answer = worker_pb2.ReaderHello(
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            layouts=[self._memory.layout.to_proto()],
        )
        try:
            if self._is_closed:
                raise TransportUnavailable("the reader is closing")
            writer = WriterStream.accept(hello, self._memory.layout, self._transports)
            answer.endpoint.CopyFrom(writer.transport.endpoint())
        except (TransportUnavailable, ValueError) as error:
            logger.warning("refused writer %s: %s", hello.engine_id, error)
            answer.refused = str(error)
            yield worker_pb2.ReaderMessage(hello=answer)
            return
        yield worker_pb2.ReaderMessage(hello=answer)
        with self._lock:
            self._peer(writer).transport = writer.transport.name
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

    async def _read(
        self, writer: WriterStream, request_iterator: AsyncIterator[worker_pb2.WriterMessage]
    ) -> None:
        try:
            async for message in request_iterator:
                if message.HasField("begin"):
                    self._begin(writer, key_from_proto(message.begin.key))
                elif message.HasField("progress"):
                    self._progress(writer, message.progress)
                elif message.HasField("end"):
                    self._end(writer, message.end)
        finally:
            writer.send(None)

    def _begin(self, writer: WriterStream, key: RequestKey) -> None:
        with self._lock:
            reservation = self._reservations.get(key)
            if writer.is_broken:
                return
            rank = writer.rank
            if reservation is None:
                reason = "these blocks are not expected (any more)"
            elif rank in reservation.parts and reservation.parts[rank].writer is writer:
                # A repeated message; the grant it asks for is on its way.
                self._counters.num_stale += 1
                return
            else:
                reason = reservation.refusal(writer.engine_id, rank, writer.needed_ranks)
                if not reason:
                    reservation.grant(writer, writer.engine_id, rank, writer.needed_ranks)
            self._counters.num_stale += bool(reason)
        grant = worker_pb2.WriteGrant(key=key_to_proto(key), granted=not reason, reason=reason)
        writer.send(worker_pb2.ReaderMessage(grant=grant))

    def _end(self, writer: WriterStream, end: worker_pb2.EndWrite) -> None:
        key = key_from_proto(end.key)
        with self._lock:
            if (found := self._writing(writer, key)) is None:
                return
            reservation, part = found
            if end.complete and not reservation.is_ended:
                part.state = PartState.VERIFYING
                self._executor.submit(self._verify, key, reservation, part, end)
                return
        if end.withdrawn:
            failure = (WITHDRAWN, f"the writer withdrew: {end.error}")
        else:
            failure = ("incomplete", f"the writer gave up: {end.error or 'aborted'}")
        self._conclude(key, reservation, part, failure)

    def _progress(self, writer: WriterStream, progress: worker_pb2.WriteProgress) -> None:
        with self._lock:
            found = self._writing(writer, key_from_proto(progress.key))
            if found is not None and self._config.checksum != "off":
                self._executor.submit(self._verify_ahead, *found, progress)

    def _writing(self, writer: WriterStream, key: RequestKey) -> tuple[_Reservation, _Part] | None:
        """What this writer may still write for a key; counts a message about anything else.

        The lock is held.
        """
        reservation = self._reservations.get(key)
        part = reservation.parts.get(writer.rank) if reservation is not None else None
        if (
            reservation is None
            or part is None
            or part.writer is not writer
            or part.state is not PartState.WRITING
        ):
            self._counters.num_stale += 1
            return None
        return reservation, part

    def _verify_ahead(
        self, reservation: _Reservation, part: _Part, progress: worker_pb2.WriteProgress
    ) -> None:
        """Check layers that are through, so that the end has less to do; by the checksum thread.

        What is wrong now, or not there yet, is looked at again at the end.
        """
        verification = self._verification(reservation, part)
        num_layers = part.writer.resharding.source.num_layers
        for layer_idx, checksum in zip(progress.layer_idx, progress.checksums, strict=False):
            if reservation.is_ended or layer_idx >= num_layers:
                return
            verification.check(layer_idx, checksum, progress.checksum_every or 1)

    def _verify(
        self, key: RequestKey, reservation: _Reservation, part: _Part, end: worker_pb2.EndWrite
    ) -> None:
        """Compare what arrived with what was sent; body of the checksum thread."""
        verification = self._verification(reservation, part)
        mismatch = ""
        if self._config.checksum != "off":
            is_landed = part.writer.transport.is_landing_guaranteed
            mismatch = verification.find_mismatch(
                tuple(end.checksums),
                end.checksum_every or 1,
                0.0 if is_landed else self._config.landing_timeout_s,
                lambda: reservation.is_ended,
            )
        failure = ("checksum", mismatch) if mismatch else ("", "")
        self._conclude(key, reservation, part, failure, num_bytes=verification.num_bytes)

    def _verification(self, reservation: _Reservation, part: _Part) -> Verification:
        if part.verification is None:
            resharding = part.writer.resharding
            placement = Placement.of(
                reservation.block_ids,
                reservation.first_block,
                reservation.num_tokens,
                block_size=resharding.target.block_size,
                source_block_size=resharding.source.block_size,
            )
            part.verification = Verification(self._memory, resharding, placement)
        return part.verification

    def _conclude(
        self,
        key: RequestKey,
        reservation: _Reservation,
        part: _Part,
        failure: tuple[str, str],
        *,
        num_bytes: int = 0,
    ) -> None:
        """One writer rank is through with the blocks. failure: (kind, reason), empty if its share
        arrived.
        """
        kind, reason = failure
        with self._lock:
            if self._reservations.get(key) is not reservation:
                return
            part.state = PartState.OVER
            is_first_failure = bool(kind) and not reservation.is_ended
            if is_first_failure:
                self._fail(key, reservation, part, kind)
            elif not reservation.is_ended:
                peer = self._peer(part.writer)
                peer.num_transfers += 1
                peer.num_blocks += len(reservation.block_ids)
                peer.num_bytes += num_bytes
            is_quiet = reservation.is_quiet
            if is_first_failure:
                withdrawn = kind == WITHDRAWN
                self._events.append(KVFailed(key, reason, quiet=is_quiet, withdrawn=withdrawn))
            elif is_quiet and reservation.is_ended:
                self._events.append(KVQuiet(key))
            elif reservation.is_complete:
                self._counters.num_arrived += 1
                self._events.append(KVArrived(key))
            if (is_quiet and reservation.is_ended) or reservation.is_complete:
                del self._reservations[key]
        self._emit()

    def _fail(self, key: RequestKey, reservation: _Reservation, part: _Part, kind: str) -> None:
        """Note the first failure of a key and stop its other ranks. The lock is held."""
        self._abort_others(key, reservation)
        reservation.is_failed = True
        if kind == WITHDRAWN:
            self._counters.num_withdrawn += 1
            return
        self._counters.failures[kind] += 1
        self._peer(part.writer).num_failures += 1

    def _abort_others(self, key: RequestKey, reservation: _Reservation) -> None:
        abort = worker_pb2.AbortWrite(key=key_to_proto(key))
        for writer in reservation.writing():
            writer.send(worker_pb2.ReaderMessage(abort=abort))

    def _break(self, writer: WriterStream) -> None:
        """The stream is over: nothing this writer was granted will end with an EndWrite.
        Idempotent.
        """
        with self._lock:
            self._writers.discard(writer)
            if writer.is_broken or self._is_closed:
                return
            writer.is_broken = True
            broken = []
            for key, reservation in self._reservations.items():
                part = reservation.parts.get(writer.rank)
                if part is None or part.writer is not writer or part.state is not PartState.WRITING:
                    continue
                part.state = PartState.QUARANTINED
                broken.append((key, reservation, part))
                if not reservation.is_ended:
                    self._fail(key, reservation, part, "link")
                    reason = "the link to the writer broke"
                    self._events.append(KVFailed(key, reason, quiet=False))
        self._emit()
        for key, reservation, part in broken:
            self._settle(writer, key, reservation, part)

    def _settle(
        self, writer: WriterStream, key: RequestKey, reservation: _Reservation, part: _Part
    ) -> None:
        """End the quarantine of a broken link after the grace; while its writer is known to be
        stopped, the grace does not begin.
        """
        then = self._settle if writer.is_stopped() else self._let_go
        writer.call_later(
            self._config.quarantine_grace_s, partial(then, writer, key, reservation, part)
        )

    def _let_go(
        self, _: WriterStream, key: RequestKey, reservation: _Reservation, part: _Part
    ) -> None:
        self._conclude(key, reservation, part, ("", ""))

    def _peer(self, writer: WriterStream) -> PeerCounters:
        return self._counters.peers.setdefault((writer.engine_id, writer.rank), PeerCounters())

    def _emit(self) -> None:
        """Call on_event for what was decided, in the order in which it was."""
        with self._emit_lock:
            while self._events and not self._is_closed:
                self._on_event(self._events.popleft())
