"""The writer's end of a KVLink: one rank of a reader, one stream, one thread that writes, and the
transfers that go there.

    wait out the backoff -> open the stream, say hello -> connect the transport -> serve transfers
    -> broken: fail what is left

A link serves one incarnation of one reader and is replaced by a new one when it breaks.
"""

import enum
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvtransfer.config import KVTransferConfig
from kvtransfer.errors import KVTransferError, TransferError, TransportUnavailable
from kvtransfer.link import RequestKey, key_from_proto, key_to_proto
from kvtransfer.peers import Backoff, PeerCounters, PeerKey
from kvtransfer.push_planner import PushPlanner
from kvtransfer.rank_transfer import Push, RankTransfer
from kvtransfer.reader_stream import ReaderStream, StreamLoop
from kvtransfer.registration import KVMemory
from kvtransfer.transports.base import Connection
from kvtransfer.transports.loading import LoadedTransports
from protos import worker_pb2

GOODBYE_TIMEOUT_S = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriterIdentity:
    """Who writes, from which memory, with what; the same for every link of a process."""

    engine_id: str
    incarnation: int
    token: str
    memory: KVMemory
    transports: LoadedTransports
    config: KVTransferConfig
    loop: StreamLoop


@dataclass(frozen=True, slots=True)
class _Ending:
    """An EndWrite that waits until the transport has let go of the target."""

    end: worker_pb2.EndWrite
    not_before_s: float


class _Phase(enum.Enum):
    OPENING = "opening"
    SERVING = "serving"
    BROKEN = "broken"


class WriterLink:
    """See the module's docstring. add, wake and close may be called from any thread."""

    def __init__(self, key: PeerKey, writer: WriterIdentity, stats: PeerCounters, backoff: Backoff):
        self.key = key
        self.num_stale = 0
        """Messages of the reader about transfers that this link does not know (any more)."""
        self._writer = writer
        self._config = writer.config
        self._stats = stats
        self._backoff = backoff
        self._condition = threading.Condition()
        self._phase = _Phase.OPENING
        self._broken_reason = ""
        self._transfers: dict[RequestKey, RankTransfer] = {}
        self._endings: list[_Ending] = []
        self._hello: worker_pb2.ReaderHello | None = None
        self._stream: ReaderStream | None = None
        self._connection: Connection | None = None
        self._planner: PushPlanner | None = None
        self._checksum_every = 1
        self._thread = threading.Thread(
            target=self._run, name=f"kv-link-{key.engine_id}", daemon=True
        )
        self._thread.start()

    def add(self, transfer: RankTransfer) -> bool:
        """Take over a transfer and its on_done; False if this link is broken and a new one is
        needed.

        Raises: ValueError: a transfer with this key is under way.
        """
        with self._condition:
            if self._phase is _Phase.BROKEN:
                return False
            if transfer.key in self._transfers:
                raise ValueError(f"{transfer.key} is being transferred already")
            self._transfers[transfer.key] = transfer
            if self._phase is _Phase.SERVING:
                self._begin(transfer)
            self._condition.notify_all()
        return True

    def wake(self) -> None:
        """Something about a transfer changed."""
        with self._condition:
            self._condition.notify_all()

    @property
    def is_broken(self) -> bool:
        """Whether this link takes no more transfers."""
        return self._phase is _Phase.BROKEN

    def close(self) -> None:
        """Break the link and end its thread; transfers fail. Returns at once, see join."""
        self._break("the sender was closed")

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        names = self._writer.transports.names
        try:
            self._wait_until(lambda: False, self._backoff.not_before_s)
            while not self._open(names):
                pass
            self._serve()
            # What was said last, such as an EndWrite, still has to leave.
            self._close_stream(GOODBYE_TIMEOUT_S)
        except KVTransferError as error:
            self._break(str(error))
        except Exception:
            logger.exception("link to %s failed", self.key)
            self._break("internal error in the link")
        finally:
            self._shut()

    def _open(self, names: list[str]) -> bool:
        """Shake hands and connect.

        False: the transport did not work out; it left `names` and another may.
        """
        deadline_s = time.monotonic() + self._config.connect_timeout_s
        self._hello = None
        self._open_stream()
        try:
            self._say_hello(names)
            self._wait_until(lambda: self._hello is not None, deadline_s)
            hello = self._check_hello()
            transport = self._writer.transports.named(hello.endpoint.transport)
            try:
                self._connection = transport.connect(hello.endpoint, deadline_s)
            except TransportUnavailable as error:
                names.remove(transport.name)
                if not names:
                    raise
                logger.warning(
                    "%s to %s: %s; next: %s", transport.name, self.key.engine_id, error, names
                )
                return False
        finally:
            if self._connection is None:
                self._close_stream()
        logger.info("KV link to %s uses %s", self.key.engine_id, transport.name)
        self._checksum_every = self._config.checksum_every(
            crosses_network=transport.crosses_network
        )
        with self._condition:
            self._stats.transport = transport.name
            self._backoff.num_failures = 0
            if self._phase is _Phase.OPENING:
                self._phase = _Phase.SERVING
                for transfer in self._transfers.values():
                    self._begin(transfer)
        return True

    def _say_hello(self, names: list[str]) -> None:
        writer = self._writer
        hello = worker_pb2.WriterHello(
            engine_id=writer.engine_id,
            incarnation=writer.incarnation,
            layouts=[writer.memory.layout.to_proto()],
            transports=names,
            host_id=writer.transports.host_id,
            pid=os.getpid(),
        )
        self._send(worker_pb2.WriterMessage(hello=hello))

    def _check_hello(self) -> worker_pb2.ReaderHello:
        hello = self._hello
        if hello is None:
            raise TransferError(
                f"no answer from {self.key.address} in {self._config.connect_timeout_s} s"
            )
        memory = self._writer.memory
        regions, resharding = self.key.check_hello(hello, memory.layout)
        self._planner = PushPlanner(memory, regions, resharding)
        return hello

    def _open_stream(self) -> None:
        def receive(message: worker_pb2.ReaderMessage) -> None:
            if self._stream is stream:
                self._receive(message)

        def end(reason: str) -> None:
            if self._stream is stream:
                self._break(reason)

        writer = self._writer
        stream = ReaderStream(writer.loop, self.key.address, writer.token, receive, end)
        self._stream = stream
        stream.open()

    def _close_stream(self, grace_s: float = 0.0) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close(grace_s)

    def _send(self, message: worker_pb2.WriterMessage) -> None:
        """Lost if there is no stream."""
        if (stream := self._stream) is not None:
            stream.send(message)

    def _receive(self, message: worker_pb2.ReaderMessage) -> None:
        with self._condition:
            if message.HasField("hello"):
                self._hello = message.hello
                if message.hello.refused:
                    self._break(f"{self.key.engine_id} refused the link: {message.hello.refused}")
            else:
                answer = message.grant if message.HasField("grant") else message.abort
                transfer = self._transfers.get(key_from_proto(answer.key))
                if transfer is None:
                    self.num_stale += 1
                    if message.HasField("abort"):
                        self._answer_abort(key_from_proto(answer.key))
                elif message.HasField("abort"):
                    transfer.fail("the reader gave up", withdrawn=True)
                elif message.grant.granted:
                    transfer.grant()
                else:
                    transfer.is_begun = False
                    transfer.fail(f"the reader refused: {message.grant.reason}")
            self._condition.notify_all()

    def _answer_abort(self, key: RequestKey) -> None:
        """The reader still waits for the end of a transfer that is over: its EndWrite was lost."""
        if all(key_from_proto(ending.end.key) != key for ending in self._endings):
            self._send_end(self._incomplete(key, "the transfer is over"))

    def _begin(self, transfer: RankTransfer) -> None:
        transfer.is_begun = True
        begin = worker_pb2.BeginWrite(key=key_to_proto(transfer.key))
        self._send(worker_pb2.WriterMessage(begin=begin))

    def _serve(self) -> None:
        connection = self._connection
        assert connection is not None, "opened"
        try:
            while self._phase is _Phase.SERVING:
                self._send_due_endings(connection)
                is_idle = True
                for transfer in list(self._transfers.values()):
                    is_idle = not self._advance(transfer, connection) and is_idle
                if is_idle:
                    self._wait_for_work()
        finally:
            # NOTE: dropped here and not with this object: the engine behind it stops when the last
            # connection is gone, which takes a second and must not happen in a garbage collection.
            self._connection = None
            connection.close()

    def _advance(self, transfer: RankTransfer, connection: Connection) -> bool:
        """Do the next thing for a transfer; False if there is nothing to do."""
        if error := transfer.find_error():
            self._end(transfer, error)
            if transfer.is_unanswered:
                self._break("the reader does not answer")
        elif batch := transfer.take_batch():
            self._write(transfer, batch, connection)
        elif transfer.is_complete():
            self._end(transfer, transfer.missing_blocks())
        else:
            return False
        return True

    def _write(self, transfer: RankTransfer, batch: list[Push], connection: Connection) -> None:
        start_s = time.monotonic()
        before = connection.num_bytes
        planner = self._planner
        assert planner is not None, "opened"
        plan_args = transfer.key, transfer.placement, batch
        deadline = partial(transfer.write_deadline_s, start_s)
        try:
            # NOTE: a layer is pushed when its kernels are launched; they run while it is queued.
            self._writer.memory.bind_thread()
            for push in batch:
                if not push.wait_computed(deadline):
                    raise TransferError(f"layer {push.layer_idx} was not computed in time")
            segments = planner.segments(*plan_args)
            checksums: list[int] = []

            def hash_batch() -> None:
                checksums.extend(planner.checksums(*plan_args, self._checksum_every))

            connection.write(segments, deadline, hash_batch)
            transfer.record_batch(batch, checksums, connection.num_bytes - before)
            self._report(transfer)
        except (TransferError, ValueError) as error:
            # NOTE: bytes of a failed write may sit in socket buffers: the reader hears of the end
            # only when they cannot land any more.
            not_before_s = time.monotonic() + self._config.quarantine_grace_s
            transfer.fail(str(error))
            self._end(transfer, transfer.find_error(), not_before_s)
        finally:
            self._stats.busy_s += time.monotonic() - start_s
            self._stats.num_bytes += connection.num_bytes - before

    def _report(self, transfer: RankTransfer) -> None:
        """Let the reader verify what is through, while the rest is being written."""
        every = self._checksum_every
        if not every or not (layers := transfer.take_report(every)):
            return
        progress = worker_pb2.WriteProgress(
            key=key_to_proto(transfer.key),
            layer_idx=[layer_idx for layer_idx, _ in layers],
            checksums=[checksum for _, checksum in layers],
            checksum_every=every,
        )
        self._send(worker_pb2.WriterMessage(progress=progress))

    def _end(self, transfer: RankTransfer, error: str, not_before_s: float = 0.0) -> None:
        """Conclude a transfer and tell the reader, at not_before_s or later if that is set."""
        with self._condition:
            self._transfers.pop(transfer.key, None)
        if error:
            self._stats.num_failures += not transfer.is_withdrawn
            end = self._incomplete(transfer.key, error, withdrawn=transfer.is_withdrawn)
            if transfer.is_begun and not_before_s:
                self._endings.append(_Ending(end, not_before_s))
            elif transfer.is_begun:
                self._send_end(end)
        else:
            self._stats.num_transfers += 1
            self._stats.num_blocks += len(transfer.block_indices)
            end = worker_pb2.EndWrite(
                key=key_to_proto(transfer.key),
                complete=True,
                checksums=transfer.layer_checksums() if self._checksum_every else (),
                checksum_every=self._checksum_every,
            )
            self._send_end(end)
        transfer.conclude(error)

    def _send_due_endings(self, connection: Connection) -> None:
        if not self._endings or connection.num_unsettled():
            return
        now = time.monotonic()
        for ending in [ending for ending in self._endings if ending.not_before_s <= now]:
            self._endings.remove(ending)
            self._send_end(ending.end)

    @staticmethod
    def _incomplete(key: RequestKey, error: str, *, withdrawn: bool = False) -> worker_pb2.EndWrite:
        return worker_pb2.EndWrite(key=key_to_proto(key), error=error, withdrawn=withdrawn)

    def _send_end(self, end: worker_pb2.EndWrite) -> None:
        self._send(worker_pb2.WriterMessage(end=end))

    def _wait_for_work(self) -> None:
        with self._condition:
            now = time.monotonic()
            deadline_s = math.inf
            if self._endings or self._transfers:
                deadline_s = now + (0.02 if self._endings else 1.0)
            for transfer in self._transfers.values():
                deadline_s = min(deadline_s, transfer.deadline_s())
            is_ready = any(transfer.is_ready() for transfer in self._transfers.values())
            if self._phase is _Phase.SERVING and not is_ready:
                is_idle = deadline_s == math.inf  # then `add` and `_break` end the wait
                self._condition.wait(None if is_idle else max(deadline_s - now, 0.001))

    def _wait_until(self, is_met: Callable[[], bool], deadline_s: float) -> None:
        """Wait while no transfer can be served, ending those that are aborted or out of time.

        Raises: TransferError: the link was broken meanwhile.
        """
        while True:
            with self._condition:
                if self._phase is _Phase.BROKEN:
                    raise TransferError(self._broken_reason)
                remaining_s = deadline_s - time.monotonic()
                if is_met() or remaining_s <= 0:
                    return
                self._condition.wait(min(remaining_s, 0.05))
                transfers = list(self._transfers.values())
            for transfer in transfers:
                if error := transfer.find_error():
                    self._end(transfer, error)

    def _break(self, reason: str) -> None:
        with self._condition:
            if self._phase is not _Phase.BROKEN:
                self._phase = _Phase.BROKEN
                self._broken_reason = reason
                self._backoff.num_failures += 1
                pause_s = self._config.backoff_initial_s * 2 ** min(self._backoff.num_failures, 16)
                self._backoff.not_before_s = time.monotonic() + min(
                    pause_s, self._config.backoff_max_s
                )
            self._condition.notify_all()

    def _shut(self) -> None:
        self._break("link closed")
        self._close_stream()
        with self._condition:
            transfers = list(self._transfers.values())
            self._transfers.clear()
        for transfer in transfers:
            self._stats.num_failures += 1
            transfer.conclude(transfer.find_error() or self._broken_reason)
