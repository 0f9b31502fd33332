"""The streams of links run on one event loop: a server's, or one of their own."""

import asyncio
import contextlib
import queue
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any

import grpc.aio
import pytest

from engine.worker.server import ServerThread
from kvtransfer.reader_stream import ReaderStream, StreamLoop
from protos import worker_pb2, worker_pb2_grpc
from tests.kvtransfer.harness import TOKEN, ReaderThread, Writer


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


@pytest.fixture
def reader() -> Iterator[ReaderThread]:
    reader = ReaderThread()
    yield reader
    reader.close()


def test_a_sender_on_the_loop_of_a_server_adds_no_thread_for_streams(reader: ReaderThread) -> None:
    server = ServerThread("grpc")
    writer = Writer(loop=server.loop)
    try:
        for number in range(2):
            key = (f"request {number}", 0)
            assert writer.send(key, reader.expect(key, [3]), [5]).ok
        assert "kv-streams" not in names_of_threads()
        writer.close()
        assert server.loop.is_running()
    finally:
        server.stop()


def test_all_links_of_a_sender_share_a_loop_that_ends_with_it(reader: ReaderThread) -> None:
    other = ReaderThread()
    writer = Writer()
    try:
        for peer in (reader, other):
            key = ("request", 0)
            target = peer.expect(key, [3])
            assert writer.send(key, target, [5]).ok
        assert names_of_threads().count("kv-streams") == 1
    finally:
        writer.close()
        other.close()
    assert "kv-streams" not in names_of_threads()


def test_a_stream_to_nobody_ends_and_says_why() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        ended: queue.Queue[str] = queue.Queue()
        messages: queue.Queue[worker_pb2.ReaderMessage] = queue.Queue()
        loop = StreamLoop()
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        stream = ReaderStream(loop, address, TOKEN, messages.put, ended.put)
        stream.open()
        try:
            assert "UNAVAILABLE" in ended.get(timeout=20)
        finally:
            stream.close()
            loop.close(5.0)
    assert messages.empty()


class RefusingReader(worker_pb2_grpc.KVLinkServicer):
    """Refuses a link late, and notes whether anything was said on it before."""

    def __init__(self) -> None:
        self.said: list[worker_pb2.WriterMessage] = []

    async def Link(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        await context.send_initial_metadata(())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                self.said.append(await anext(request_iterator))
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
        yield worker_pb2.ReaderMessage()


def test_nothing_is_written_before_the_reader_lets_it_in() -> None:
    refusing, server = RefusingReader(), ServerThread("grpc")
    address: Future[str] = Future()

    async def serve() -> grpc.aio.Server:
        grpc_server = grpc.aio.server()
        worker_pb2_grpc.add_KVLinkServicer_to_server(refusing, grpc_server)
        port = grpc_server.add_insecure_port("127.0.0.1:0")
        await grpc_server.start()
        address.set_result(f"127.0.0.1:{port}")
        return grpc_server

    serving = asyncio.run_coroutine_threadsafe(serve(), server.loop)
    ended: queue.Queue[str] = queue.Queue()
    loop = StreamLoop()
    stream = ReaderStream(loop, address.result(10), TOKEN, lambda message: None, ended.put)
    stream.send(worker_pb2.WriterMessage(hello=worker_pb2.WriterHello()))
    stream.open()
    try:
        assert "UNAUTHENTICATED" in ended.get(timeout=20)
        assert refusing.said == []
    finally:
        stream.close()
        loop.close(5.0)
        asyncio.run_coroutine_threadsafe(serving.result().stop(None), server.loop).result(10)
        server.stop()
