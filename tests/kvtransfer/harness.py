"""A reader and a writer with real gRPC and real transports between them."""

import asyncio
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from typing import Any

import grpc.aio
import torch
import xxhash

from kvtransfer.config import KVTransferConfig
from kvtransfer.connector import LINK_OPTIONS, BlockCopy, ReceiveEvent, Receiver, Sender
from kvtransfer.layout import KVLayout
from kvtransfer.link import RequestKey, TransferResult
from kvtransfer.registration import KVMemory
from kvtransfer.transfer import Transfer
from kvtransfer.transports.loading import LoadedTransports
from protos import worker_pb2, worker_pb2_grpc

TOKEN = "secret"
LAYOUT = KVLayout(dtype="float32", num_layers=3, num_kv_heads=2, head_dim=16, block_size=8)
NUM_BLOCKS = 64
CONFIG = KVTransferConfig(
    transport="memory",
    checksum="full",
    quarantine_grace_s=0.2,
    progress_timeout_s=1.5,
    connect_timeout_s=1.0,
    abort_patience_s=1.0,
    min_batch_bytes=0,  # these layers are small, and tests look at what is under way
)


class ReaderThread:
    """A Receiver with its server in a thread of this process."""

    def __init__(
        self,
        config: KVTransferConfig = CONFIG,
        *,
        layout: KVLayout = LAYOUT,
        incarnation: int = 1,
        port: int = 0,
        transports: Callable[[KVMemory], LoadedTransports] | None = None,
    ):
        self.memory = KVMemory.allocate(layout, NUM_BLOCKS)
        self.events: queue.Queue[ReceiveEvent] = queue.Queue()
        self.incarnation = incarnation
        self.receiver = Receiver(
            self.memory,
            engine_id="reader",
            incarnation=incarnation,
            config=config,
            token=TOKEN,
            on_event=self.events.put,
            transports=transports(self.memory) if transports else None,
        )
        self._started: Future[str] = Future()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(port)))
        self._thread.start()
        self.address = self._started.result(10)

    async def _serve(self, port: int) -> None:
        server = grpc.aio.server(options=list(LINK_OPTIONS))
        worker_pb2_grpc.add_KVLinkServicer_to_server(self.receiver, server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        self._started.set_result(f"127.0.0.1:{bound}")
        await asyncio.to_thread(self._stop.wait)
        await server.stop(0.5)

    def target(self, block_ids: Sequence[int]) -> worker_pb2.KVTarget:
        return worker_pb2.KVTarget(
            engine_id="reader",
            incarnation=self.incarnation,
            link_address=self.address,
            block_ids=block_ids,
        )

    def expect(self, key: RequestKey, block_ids: Sequence[int]) -> worker_pb2.KVTarget:
        self.receiver.expect(key, block_ids)
        return self.target(block_ids)

    def next_event(self, timeout_s: float = 5.0) -> ReceiveEvent:
        return self.events.get(timeout=timeout_s)

    def assert_no_event(self, for_s: float = 0.1) -> None:
        time.sleep(for_s)
        assert self.events.empty(), self.events.get()

    def close(self) -> None:
        self.receiver.close()
        self._stop.set()
        self._thread.join(10)
        self.memory.close()


class Writer:
    """A Sender over memory filled with random bytes."""

    def __init__(
        self,
        config: KVTransferConfig = CONFIG,
        *,
        layout: KVLayout = LAYOUT,
        token: str = TOKEN,
        engine_id: str = "writer",
        transports: Callable[[KVMemory], LoadedTransports] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        replica: int = 0,
        num_replicas: int = 1,
    ):
        self.memory = KVMemory.allocate(layout, NUM_BLOCKS)
        generator = torch.Generator().manual_seed(1)
        for caches in self.memory.caches:
            for cache in caches:
                cache.copy_(torch.randn(cache.shape, generator=generator))
        self.sender = Sender(
            self.memory,
            engine_id=engine_id,
            incarnation=1,
            config=config,
            token=token,
            transports=transports(self.memory) if transports else None,
            loop=loop,
            replica=replica,
            num_replicas=num_replicas,
        )
        self.results: queue.Queue[TransferResult] = queue.Queue()

    def begin(self, key: RequestKey, target: worker_pb2.KVTarget) -> Transfer:
        return self.sender.begin(key, target, self.results.put)

    def push_all(self, transfer: Transfer, source_blocks: Sequence[int]) -> None:
        copies = [BlockCopy(block, i) for i, block in enumerate(source_blocks)]
        for layer_idx in range(self.memory.layout.num_layers):
            transfer.push(layer_idx, copies)

    def send(
        self, key: RequestKey, target: worker_pb2.KVTarget, source_blocks: Sequence[int]
    ) -> TransferResult:
        transfer = self.begin(key, target)
        self.push_all(transfer, source_blocks)
        transfer.finish()
        return self.next_result()

    def next_result(self, timeout_s: float = 8.0) -> TransferResult:
        return self.results.get(timeout=timeout_s)

    def close(self) -> None:
        self.sender.close()
        self.memory.close()


@contextmanager
def pair(
    config: KVTransferConfig = CONFIG, **changes: Any
) -> Iterator[tuple[Writer, ReaderThread]]:
    config = replace(config, **changes)
    reader = ReaderThread(config)
    writer = Writer(config)
    try:
        yield writer, reader
    finally:
        writer.close()
        reader.close()


def assert_blocks_equal(
    source: KVMemory, source_blocks: Sequence[int], target: KVMemory, target_blocks: Sequence[int]
) -> None:
    for ours, theirs in zip(
        source.k_caches + source.v_caches, target.k_caches + target.v_caches, strict=True
    ):
        assert torch.equal(ours[list(source_blocks)], theirs[list(target_blocks)])


def layer_checksum(memory: KVMemory, layer_idx: int, blocks: Sequence[int]) -> str:
    tensors = [part[layer_idx][list(blocks)] for part in memory.caches]
    return xxhash.xxh3_64_hexdigest(b"".join(tensor.numpy().tobytes() for tensor in tensors))


def assert_untouched(memory: KVMemory, blocks: Sequence[int]) -> None:
    for cache in memory.k_caches + memory.v_caches:
        assert not cache[list(blocks)].any()


def eventually(is_met: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_met():
        assert time.monotonic() < deadline_s, "not met in time"
        time.sleep(0.01)


def spawn(
    target: Callable[..., None], *args: Any
) -> tuple[multiprocessing.process.BaseProcess, Pipe]:
    """Start target(pipe, *args) in a new interpreter; return it and our end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours
