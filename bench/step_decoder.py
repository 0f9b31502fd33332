"""What sends tokens in bench_proxy.py: a decoder that computes nothing, and the floor.

The floor is a bare uvloop server in the place of decoder and proxy: it writes an event of the same
size to every connection once an interval, and knows nothing of requests.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from protos import worker_pb2, worker_pb2_grpc
from protos.step_message import step_message

MODEL = "bench"
TOKEN_ID, TOKEN_TEXT = 260, b" the"
Key = tuple[str, int]
# As the proxy writes it: an event of a text completion, in a chunk of HTTP.
_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
    b'"created":1700000000,"model":"bench","choices":[{"index":0,"text":" the","logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_START = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
_LABEL = re.compile(rb'"prompt": \[(\d+)')


@dataclass(slots=True)
class Sequence:
    """A running sequence of the decoder."""

    key: worker_pb2.RequestKey
    max_tokens: int
    label: int
    num_sent: int = 0
    sent_s: list[float] = field(default_factory=list)


class StepDecoder(worker_pb2_grpc.WorkerServicer, worker_pb2_grpc.ControllerServicer):
    """A decoder, and the controller that names it: a token per sequence and interval."""

    def __init__(self, interval_s: float) -> None:
        self.address = ""
        self.sent_s: dict[int, list[float]] = {}
        """By label, which is the first token of the prompt."""
        self._interval_s = interval_s
        self._reserved: dict[Key, Sequence] = {}
        self._running: dict[Key, Sequence] = {}

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.Membership]:
        """Name the one worker."""
        entry = worker_pb2.WorkerEntry(
            engine_id="decode-0",
            incarnation=1,
            role=worker_pb2.ROLE_DECODER,
            address=self.address,
            state=worker_pb2.WORKER_READY,
        )
        while True:
            yield worker_pb2.Membership(generation=1, workers=[entry])
            await asyncio.sleep(5.0)

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.ProxyMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """Take work and send steps."""
        out: asyncio.Queue[worker_pb2.WorkerMessage] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._read(request_iterator, out)),
            asyncio.create_task(self._step(out)),
        ]
        hello = worker_pb2.WorkerHello(
            engine_id="decode-0",
            incarnation=1,
            role=worker_pb2.ROLE_DECODER,
            layout=worker_pb2.KVLayout(block_size=32),
            num_blocks=1000,
            max_model_len=8192,
        )
        try:
            yield worker_pb2.WorkerMessage(hello=hello)
            while True:
                yield await out.get()
        finally:
            for task in tasks:
                task.cancel()

    async def _read(
        self,
        messages: AsyncIterator[worker_pb2.ProxyMessage],
        out: "asyncio.Queue[worker_pb2.WorkerMessage]",
    ) -> None:
        async for message in messages:
            kind = message.WhichOneof("message")
            if kind == "reserve":
                work, key = message.reserve.work, message.reserve.key
                sequence = Sequence(key, work.sampling.max_tokens, work.token_ids[0])
                self._reserved[key.request_id, key.attempt] = sequence
                reserved = worker_pb2.Reserved(key=key, target=worker_pb2.KVTarget())
                out.put_nowait(worker_pb2.WorkerMessage(reserved=reserved))
            elif kind == "prefill_locally":
                key = message.prefill_locally.key
                sequence = self._reserved.pop((key.request_id, key.attempt))
                self._running[key.request_id, key.attempt] = sequence
                self.sent_s[sequence.label] = sequence.sent_s
            elif kind == "cancel":
                key = message.cancel.key
                if self._running.pop((key.request_id, key.attempt), None) is not None:
                    released = worker_pb2.Released(key=key)
                    out.put_nowait(worker_pb2.WorkerMessage(released=released))

    async def _step(self, out: "asyncio.Queue[worker_pb2.WorkerMessage]") -> None:
        loop = asyncio.get_running_loop()
        next_s = next_stats_s = loop.time()
        while True:
            next_s += self._interval_s
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            if loop.time() > next_stats_s:
                next_stats_s = loop.time() + 1.0
                stats = worker_pb2.WorkerStats(num_running=len(self._running), num_blocks=1000)
                out.put_nowait(worker_pb2.WorkerMessage(stats=stats))
            if not self._running:
                continue
            outputs, over = [], []
            for key, sequence in self._running.items():
                is_last = sequence.num_sent + 1 == sequence.max_tokens
                outputs.append(
                    worker_pb2.TokenOutput(
                        key=sequence.key,
                        output_index=sequence.num_sent,
                        token_ids=(TOKEN_ID,),
                        finish_reason=worker_pb2.FINISH_LENGTH
                        if is_last
                        else worker_pb2.FINISH_NONE,
                    )
                )
                sequence.num_sent += 1
                if is_last:
                    over.append(key)
            message = worker_pb2.WorkerMessage(step=step_message(outputs))
            now_s = time.monotonic()
            for sequence in self._running.values():
                sequence.sent_s.append(now_s)
            out.put_nowait(message)
            for key in over:
                released = worker_pb2.Released(key=self._running.pop(key).key)
                out.put_nowait(worker_pb2.WorkerMessage(released=released))


async def run_decoder(interval_s: float, folder: Path) -> None:
    """Serve until stdin ends, then write when each token was sent."""
    server = grpc.aio.server()
    decoder = StepDecoder(interval_s)
    worker_pb2_grpc.add_WorkerServicer_to_server(decoder, server)
    worker_pb2_grpc.add_ControllerServicer_to_server(decoder, server)
    decoder.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    (folder / "address.partial").write_text(decoder.address)
    (folder / "address.partial").replace(folder / "address")
    await asyncio.to_thread(sys.stdin.read)
    (folder / "sent.json").write_text(json.dumps(decoder.sent_s))
    await server.stop(0)


class BareStreams(asyncio.Protocol):
    """One connection of the floor: its request is only looked at for its label."""

    def __init__(self, running: "dict[BareStreams, list[float]]", sent: dict[int, list[float]]):
        self._running = running
        self._sent = sent
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the request."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Start to stream."""
        label = _LABEL.search(data)
        assert label is not None
        self._running[self] = self._sent[int(label[1])] = []
        self.write(_START)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop."""
        self._running.pop(self, None)

    def write(self, data: bytes) -> None:
        """Send bytes."""
        assert self._transport is not None
        self._transport.write(data)


async def run_floor(interval_s: float, folder: Path) -> None:
    """Write to all connections until stdin ends, then say when each event was due."""
    loop = asyncio.get_running_loop()
    running: dict[BareStreams, list[float]] = {}
    sent: dict[int, list[float]] = {}
    server = await loop.create_server(
        lambda: BareStreams(running, sent), "127.0.0.1", 0, backlog=2048
    )

    async def step() -> None:
        next_s = loop.time()
        while True:
            next_s += interval_s
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            now_s = time.monotonic()
            for i, (stream, times) in enumerate(list(running.items())):
                times.append(now_s)
                stream.write(_CHUNK)
                if i % 32 == 31:
                    await asyncio.sleep(0)

    stepping = asyncio.create_task(step())
    (folder / "address.partial").write_text(str(server.sockets[0].getsockname()[1]))
    (folder / "address.partial").replace(folder / "address")
    await asyncio.to_thread(sys.stdin.read)
    stepping.cancel()
    (folder / "sent.json").write_text(json.dumps(sent))
    server.close()
