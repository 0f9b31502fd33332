"""The streams of links run on one event loop: a server's, or one of their own."""

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from engine.worker.server import ServerThread
from kvtransfer.reader_stream import ReaderStream, StreamLoop
from protos import worker_pb2
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
