"""torch.distributed point-to-point between one writer and one reader: gloo for memory of the host,
HCCL for a device's, by config; the code is the same. Only gloo has been run.

    reader: a TCPStore  <--join/<n>-- writer          each join makes a process group of two
    writer --(segments, bytes), table of targets, bytes--> reader
           <--acknowledged once all of them are stored--

Bytes are sent from the cache's own memory and received into it where a message is one run of it;
what is scattered is brought together in a staging tensor beside it, at most STAGE_BYTES at once.
Nothing of a device's memory comes to the host. A group of which one operation failed is given up,
as its state is not known; the next write makes a new one. The reader then notes in its store that
nothing can land from the old one any more, which is what num_unsettled waits for.
"""

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from kvtransfer.errors import TransferError, TransportUnavailable
from kvtransfer.registration import NONCE_BYTES, KVMemory
from kvtransfer.transports.base import Segment
from protos import worker_pb2

NAME = "hccl"
STAGE_BYTES = 8 << 20
MAX_SEGMENTS = 4096
ACCEPT_POLL_S = 0.02
IDLE_TIMEOUT = timedelta(days=7)
WRITER, READER = 1, 0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a reader's store listens, as JSON in TransferEndpoint.address."""

    host: str
    port: int
    secret: str
    """Part of every key: who does not know it cannot join."""
    base_address: int


class Group(Protocol):
    """What is used of a process group."""

    def send(self, tensors: list[Tensor], to_rank: int, tag: int) -> Work:
        """Start to send."""
        ...

    def recv(self, tensors: list[Tensor], from_rank: int, tag: int) -> Work:
        """Start to receive."""
        ...


class Pair:
    """A process group of one writer and one reader; ends when it is no longer referenced."""

    def __init__(self, backend: str, host: str, store: Store, rank: int, timeout: timedelta):
        """Meet the other end. Raises: RuntimeError: it did not come in time."""
        self._peer = 1 - rank
        self._group = _GROUPS[backend](host, store, rank, timeout)

    def send(self, tensor: Tensor, timeout: timedelta) -> None:
        """Raises: RuntimeError: the peer is gone or too slow; the pair is of no use any more."""
        self._group.send([tensor], self._peer, 0).wait(timeout)

    def recv(self, tensor: Tensor, timeout: timedelta) -> None:
        """Fill `tensor`. Raises: as `send`."""
        self._group.recv([tensor], self._peer, 0).wait(timeout)


def _gloo_group(host: str, store: Store, rank: int, timeout: timedelta) -> Group:
    # The stubs leave out the options, the only way to name the interface, and the operations.
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, 2, options)  # type: ignore[return-value]


def _hccl_group(host: str, store: Store, rank: int, timeout: timedelta) -> Group:
    group: Group = dist.Backend._plugins["HCCL"].creator_fn(store, rank, 2, timeout)
    return group


_GROUPS: dict[str, Callable[[str, Store, int, timedelta], Group]] = {
    "gloo": _gloo_group,
    "hccl": _hccl_group,
}


def memory_bytes(memory: KVMemory) -> Tensor:
    """[num_bytes] uint8: all of it as a tensor of its device; element 0 is at base_address.

    Raises: RuntimeError: it is closed. NOTE: while the tensor is there, the memory is, too.
    """
    if not memory.k_caches:
        raise RuntimeError("the memory is closed")
    storage = memory.k_caches[0].untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    start = memory.base_address - storage.data_ptr()
    return whole[start : start + memory.num_bytes]


class HCCLConnection:
    """One writer's way to one reader; makes a new pair after a failure."""

    def __init__(self, backend: str, host: str, memory: KVMemory, address: StoreAddress):
        self.num_bytes = 0
        self._backend = backend
        self._host = host
        self._memory = memory
        self._address = address
        self._store: TCPStore | None = None
        self._pair: Pair | None = None
        self._number = 0
        self._given_up: list[str] = []
        """Keys that the reader sets once nothing can land from a pair that failed."""

    def open(self, deadline_s: float) -> None:
        """Join the reader. Raises: RuntimeError: it does not answer in time."""
        timeout = _until(deadline_s)
        address = self._address
        if self._store is None:
            self._store = TCPStore(address.host, address.port, is_master=False, timeout=timeout)
        self._number = self._store.add(f"{address.secret}/joined", 1)
        self._store.set(f"{address.secret}/join/{self._number}", "")
        store = PrefixStore(f"{address.secret}/pair/{self._number}", self._store)
        self._pair = Pair(self._backend, self._host, store, WRITER, timeout)

    def write(
        self,
        segments: Sequence[Segment],
        deadline: Callable[[], float],
        meanwhile: Callable[[], None],
    ) -> None:
        """See Connection.write. A segment may be split over several messages."""
        # NOTE: an Ascend device is chosen thread by thread, and whoever calls has one of its own.
        self._memory.bind_thread()
        meanwhile()
        if self.num_unsettled():
            raise TransferError("a failed write to this peer may still be landing")
        try:
            if self._pair is None:
                self.open(deadline())
            for message in _messages(segments):
                self._write_message(message, deadline())
        except RuntimeError as error:
            self._give_up()
            raise TransferError(f"{self._backend} write failed: {error}") from error

    def num_unsettled(self) -> int:
        """See Connection: pairs that failed and that the reader did not leave yet."""
        store = self._store
        if store is not None and self._given_up:
            # A reader that does not answer may still be storing.
            with contextlib.suppress(RuntimeError):
                self._given_up = [key for key in self._given_up if not store.check([key])]
        return len(self._given_up)

    def close(self) -> None:
        """See Connection."""
        self._pair = None
        self._store = None

    def _write_message(self, segments: Sequence[Segment], deadline_s: float) -> None:
        pair = self._pair
        assert pair is not None, "open came first"
        num_bytes = sum(segment.num_bytes for segment in segments)
        source, own_base = memory_bytes(self._memory), self._memory.base_address
        starts = [segment.source_address - own_base for segment in segments]
        parts = [source[start:][: s.num_bytes] for start, s in zip(starts, segments, strict=True)]
        base = self._address.base_address
        table = torch.tensor(
            [(target - base, size) for _, target, size in segments], dtype=torch.int64
        )
        header = torch.tensor([len(segments), num_bytes], dtype=torch.int64)
        data = parts[0] if len(parts) == 1 else torch.cat(parts)
        for tensor in (header, table, data):
            pair.send(tensor.to(source.device), _until(deadline_s))
        answer = torch.empty(1, dtype=torch.int64, device=source.device)
        pair.recv(answer, _until(deadline_s))
        if answer.item() != num_bytes:
            raise TransferError("the reader refused the segments: they lie outside its memory")
        self.num_bytes += num_bytes

    def _give_up(self) -> None:
        if self._pair is not None:
            self._pair = None
            self._given_up.append(f"{self._address.secret}/left/{self._number}")


class _Server:
    """The reader's store, and a thread for each writer that joins."""

    def __init__(self, backend: str, host: str, memory: KVMemory, timeout: timedelta):
        self._backend = backend
        self._host = host
        self._memory = memory
        self._timeout = timeout
        self._secret = secrets.token_hex(16)
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="kv-hccl-accept", daemon=True)
        self._thread.start()

    @property
    def address(self) -> StoreAddress:
        """What a writer is told."""
        return StoreAddress(self._host, self._store.port, self._secret, self._memory.base_address)

    def close(self) -> None:
        """Take nothing more; what is on its way lands in memory that is still there. A thread whose
        writer hangs ends with the process.
        """
        self._stop.set()
        self._thread.join()
        with self._lock:
            pass

    def _accept(self) -> None:
        number = 1
        while not self._stop.wait(ACCEPT_POLL_S):
            while self._store.check([f"{self._secret}/join/{number}"]):
                threading.Thread(
                    target=self._serve, args=(number,), name=f"kv-hccl-{number}", daemon=True
                ).start()
                number += 1

    def _serve(self, number: int) -> None:
        """Receive from one writer until it leaves; body of its thread."""
        self._memory.bind_thread()
        client = TCPStore(self._host, self._store.port, is_master=False, timeout=self._timeout)
        try:
            store = PrefixStore(f"{self._secret}/pair/{number}", client)
            pair = Pair(self._backend, self._host, store, READER, self._timeout)
            while not self._stop.is_set():
                self._receive_message(pair)
        except RuntimeError as error:
            logger.debug("writer %d left: %s", number, error)
        # NOTE: not before nothing can be stored any more: the writer waits for it.
        with contextlib.suppress(RuntimeError):
            client.set(f"{self._secret}/left/{number}", "")

    def _receive_message(self, pair: Pair) -> None:
        device = memory_bytes(self._memory).device
        header = torch.empty(2, dtype=torch.int64, device=device)
        pair.recv(header, IDLE_TIMEOUT)
        num_segments, num_bytes = header.tolist()
        if not (0 < num_segments <= MAX_SEGMENTS and 0 <= num_bytes <= STAGE_BYTES):
            raise RuntimeError(f"{num_segments} segments of {num_bytes} bytes")
        table = torch.empty((num_segments, 2), dtype=torch.int64, device=device)
        pair.recv(table, self._timeout)
        is_stored = self._receive_segments(pair, table.tolist(), num_bytes)
        answer = torch.tensor([num_bytes if is_stored else -1], dtype=torch.int64)
        pair.send(answer.to(device), self._timeout)

    def _receive_segments(self, pair: Pair, table: list[list[int]], num_bytes: int) -> bool:
        """Receive the bytes and put them where the table says; False: that is not in the memory."""
        # NOTE: a tensor of it keeps the memory from being unmapped under an operation.
        with self._lock:
            if self._stop.is_set():
                raise RuntimeError("the reader is closing")
            target = memory_bytes(self._memory)
        size = self._memory.num_bytes - NONCE_BYTES
        fits = sum(num for _, num in table) == num_bytes and all(
            offset >= 0 and num >= 0 and offset + num <= size for offset, num in table
        )
        if fits and len(table) == 1:
            offset = table[0][0]
            pair.recv(target[offset : offset + num_bytes], self._timeout)
            return True
        staged = target.new_empty(num_bytes)
        pair.recv(staged, self._timeout)
        if fits:
            start = 0
            for offset, num in table:
                target[offset : offset + num] = staged[start : start + num]
                start += num
        return fits


class HCCLTransport:
    """See Transport."""

    name = NAME
    crosses_network = True
    is_landing_guaranteed = True

    def __init__(self, *, backend: str, host: str, timeout_s: float):
        """backend: gloo or hccl. timeout_s: for the reader's end of a message that has begun.

        Raises: TransportUnavailable: this build of torch does not have the backend.
        """
        if not dist.is_available() or (backend == "gloo" and not dist.is_gloo_available()):
            raise TransportUnavailable(f"torch.distributed has no {backend} here")
        if backend == "hccl" and "HCCL" not in dist.Backend._plugins:
            raise TransportUnavailable("torch_npu, which brings the hccl backend, is not loaded")
        self._backend = backend
        self._host = host
        self._timeout = timedelta(seconds=timeout_s)
        self._memory: KVMemory | None = None
        self._server: _Server | None = None

    def register(self, memory: KVMemory) -> None:
        """See Transport."""
        self._memory = memory

    def endpoint(self) -> worker_pb2.TransferEndpoint:
        """See Transport; the first call opens the store."""
        memory = self._memory
        assert memory is not None, "register comes first"
        if self._server is None:
            self._server = _Server(self._backend, self._host, memory, self._timeout)
        return worker_pb2.TransferEndpoint(
            transport=NAME,
            address=json.dumps(asdict(self._server.address)),
            regions=[region.to_proto() for region in memory.regions],
        )

    def connect(self, endpoint: worker_pb2.TransferEndpoint, deadline_s: float) -> HCCLConnection:
        """See Transport."""
        assert self._memory is not None, "register comes first"
        address = StoreAddress(**json.loads(endpoint.address))
        connection = HCCLConnection(self._backend, self._host, self._memory, address)
        try:
            connection.open(deadline_s)
        except RuntimeError as error:
            connection.close()
            raise TransportUnavailable(
                f"cannot join {address.host}:{address.port} by {self._backend}: {error}"
            ) from error
        return connection

    def close(self) -> None:
        """See Transport."""
        if self._server is not None:
            self._server.close()
        self._server = None
        self._memory = None


def _messages(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Segments, joined and cut, in messages of at most STAGE_BYTES and MAX_SEGMENTS."""
    message: list[Segment] = []
    space = STAGE_BYTES
    for source, target, num_bytes in _joined(segments):
        start = 0
        while start < num_bytes:
            size = min(num_bytes - start, space)
            message.append(Segment(source + start, target + start, size))
            start += size
            space -= size
            if space == 0 or len(message) == MAX_SEGMENTS:
                yield message
                message, space = [], STAGE_BYTES
    if message:
        yield message


def _joined(segments: Sequence[Segment]) -> Iterator[Segment]:
    """The same copies, those that go on where the last one ended as one."""
    last = Segment(0, 0, 0)
    for segment in segments:
        if segment[:2] == (
            last.source_address + last.num_bytes,
            last.target_address + last.num_bytes,
        ):
            last = last._replace(num_bytes=last.num_bytes + segment.num_bytes)
            continue
        if last.num_bytes:
            yield last
        last = segment
    if last.num_bytes:
        yield last


def _until(deadline_s: float) -> timedelta:
    # NOTE: zero would mean no limit.
    return timedelta(seconds=max(deadline_s - time.monotonic(), 0.001))
