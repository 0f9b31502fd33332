"""Writer and reader in processes of their own: what a death or a pause does to the other end."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe

import pytest

from kvtransfer.connector import BlockCopy, KVArrived, KVFailed, KVQuiet
from protos import worker_pb2
from tests.kvtransfer.harness import (
    CONFIG,
    LAYOUT,
    ReaderThread,
    Writer,
    assert_blocks_equal,
    layer_checksum,
    spawn,
)
from tests.kvtransfer.relay import Relay, target_through

K = ("request", 0)
TRANSPORTS = pytest.mark.parametrize("transport", ["memory", "mooncake", "hccl"])
BIG = replace(LAYOUT, num_kv_heads=4, head_dim=64, block_size=128)


def run_reader(pipe: Pipe, transport: str, layout_is_big: bool) -> None:
    """Answer (expect, key, blocks), (checksums, blocks), (event, timeout_s) and (close,)."""
    layout = BIG if layout_is_big else LAYOUT
    reader = ReaderThread(replace(CONFIG, transport=transport), layout=layout)
    pipe.send("ready")
    while True:
        command, *args = pipe.recv()
        if command == "expect":
            pipe.send(reader.expect(*args).SerializeToString())
        elif command == "checksums":
            layers = range(layout.num_layers)
            pipe.send([layer_checksum(reader.memory, layer, *args) for layer in layers])
        elif command == "event":
            pipe.send(reader.next_event(*args))
        else:
            reader.close()
            return


def run_writer(pipe: Pipe, transport: str, target: bytes) -> None:
    """Push one layer and half of the next, and hang."""
    writer = Writer(replace(CONFIG, transport=transport))
    transfer = writer.begin(K, worker_pb2.KVTarget.FromString(target))
    transfer.push(0, [BlockCopy(1, 0), BlockCopy(2, 1)])
    transfer.push(1, [BlockCopy(1, 0)])
    while transfer.num_bytes < 3 * LAYOUT.block_bytes_all_layers // LAYOUT.num_layers:
        time.sleep(0.01)
    pipe.send("pushed")
    time.sleep(60)


class RemoteReader:
    def __init__(self, transport: str, layout_is_big: bool = False):
        self.process, self._pipe = spawn(run_reader, transport, layout_is_big)
        assert self._receive() == "ready"

    def ask(self, *command: object) -> object:
        self._pipe.send(command)
        return self._receive()

    def expect(self, key: tuple[str, int], blocks: list[int]) -> worker_pb2.KVTarget:
        target = self.ask("expect", key, blocks)
        assert isinstance(target, bytes)
        return worker_pb2.KVTarget.FromString(target)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def _receive(self) -> object:
        assert self._pipe.poll(90), "the reader process does not answer"
        return self._pipe.recv()

    def close(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self._pipe.send(("close",))
            self.process.join(10)
            self.process.kill()
        self.process.join(5)
        self._pipe.close()


@contextmanager
def remote_reader(transport: str, layout_is_big: bool = False) -> Iterator[RemoteReader]:
    reader = RemoteReader(transport, layout_is_big)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def local_writer(transport: str, layout_is_big: bool = False) -> Iterator[Writer]:
    writer = Writer(replace(CONFIG, transport=transport), layout=BIG if layout_is_big else LAYOUT)
    try:
        yield writer
    finally:
        writer.close()


@TRANSPORTS
def test_bytes_are_equal_across_processes(transport: str) -> None:
    source, target = [9, 3, 4, 5, 60], [1, 2, 3, 50, 51]
    with remote_reader(transport) as reader, local_writer(transport) as writer:
        result = writer.send(K, reader.expect(K, target), source)
        assert result.ok, result
        assert reader.ask("event", 5.0) == KVArrived(K)
        assert reader.ask("checksums", target) == [
            layer_checksum(writer.memory, layer, source) for layer in range(LAYOUT.num_layers)
        ]
        assert writer.sender.stats()[0].num_bytes == 5 * LAYOUT.block_bytes_all_layers


@TRANSPORTS
def test_a_writer_killed_in_a_transfer_fails_it_and_is_quiet_after_the_grace(
    transport: str,
) -> None:
    reader = ReaderThread(replace(CONFIG, transport=transport))
    target = reader.expect(K, [1, 2]).SerializeToString()
    process, pipe = spawn(run_writer, transport, target)
    assert pipe.poll(90)
    assert pipe.recv() == "pushed"
    process.kill()
    start_s = time.monotonic()
    event = reader.next_event()
    assert isinstance(event, KVFailed)
    assert not event.quiet
    assert reader.next_event() == KVQuiet(K)
    assert CONFIG.quarantine_grace_s <= time.monotonic() - start_s < 3
    stats = reader.receiver.stats()
    assert (stats.num_granted, stats.num_quarantined, stats.failures) == (0, 0, {"link": 1})
    process.join(5)
    pipe.close()
    with local_writer(transport) as writer:
        again = ("request", 1)
        assert writer.send(again, reader.expect(again, [1, 2]), [3, 4]).ok
        assert reader.next_event() == KVArrived(again)
        assert_blocks_equal(writer.memory, [3, 4], reader.memory, [1, 2])
    reader.close()


def test_blocks_of_a_stopped_writer_stay_in_quarantine_until_it_has_woken() -> None:
    reader = ReaderThread()
    relay = Relay(reader.address)
    target = target_through(relay, reader.expect(K, [1, 2])).SerializeToString()
    process, pipe = spawn(run_writer, "memory", target)
    assert pipe.poll(90)
    assert pipe.recv() == "pushed"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    relay.close()  # as the end of pings that go unanswered would
    event = reader.next_event()
    assert isinstance(event, KVFailed)
    assert not event.quiet
    reader.assert_no_event(5 * CONFIG.quarantine_grace_s)
    assert reader.receiver.stats().num_quarantined_blocks == 2
    os.kill(process.pid, signal.SIGCONT)
    start_s = time.monotonic()
    assert reader.next_event() == KVQuiet(K)
    assert time.monotonic() - start_s >= CONFIG.quarantine_grace_s
    process.kill()
    process.join(5)
    pipe.close()
    reader.close()


@TRANSPORTS
def test_a_reader_killed_in_a_transfer_fails_it_in_time(transport: str) -> None:
    with remote_reader(transport) as reader, local_writer(transport) as writer:
        transfer = writer.begin(K, reader.expect(K, [1, 2]))
        transfer.push(0, [BlockCopy(1, 0), BlockCopy(2, 1)])
        while transfer.num_bytes == 0:
            time.sleep(0.01)
        reader.signal(signal.SIGKILL)
        start_s = time.monotonic()
        transfer.push(1, [BlockCopy(1, 0), BlockCopy(2, 1)])
        assert not writer.next_result().ok
        assert time.monotonic() - start_s < CONFIG.progress_timeout_s + 1.5
        other = ReaderThread(replace(CONFIG, transport=transport))
        again = ("request", 1)
        assert writer.send(again, other.expect(again, [1]), [3]).ok
        assert other.next_event() == KVArrived(again)
        other.close()


def test_a_paused_reader_keeps_its_blocks_until_what_is_on_the_way_has_landed() -> None:
    with remote_reader("mooncake", True) as reader, local_writer("mooncake", True) as writer:
        warm = ("warm", 0)
        assert writer.send(warm, reader.expect(warm, [63]), [63]).ok
        assert reader.ask("event", 5.0) == KVArrived(warm)
        blocks = list(range(0, 60, 2))
        transfer = writer.begin(K, reader.expect(K, blocks))
        time.sleep(0.2)
        reader.signal(signal.SIGSTOP)
        writer.push_all(transfer, blocks)
        transfer.finish()
        start_s = time.monotonic()
        assert "deadline" in writer.next_result().error
        assert time.monotonic() - start_s < CONFIG.progress_timeout_s + 1
        reader.signal(signal.SIGCONT)
        event = reader.ask("event", 5.0)
        assert isinstance(event, KVFailed)
        assert event.quiet
        before = reader.ask("checksums", blocks)
        time.sleep(0.3)
        assert reader.ask("checksums", blocks) == before, "a late write landed after EndWrite"
        again = ("again", 0)
        assert writer.send(again, reader.expect(again, blocks), blocks).ok
        assert reader.ask("event", 5.0) == KVArrived(again)
