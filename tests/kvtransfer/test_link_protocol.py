"""The reader's end of the link, against a writer that says what it likes."""

import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from kvtransfer.checksum import HashedRuns
from kvtransfer.connector import KVArrived, KVFailed, KVQuiet
from kvtransfer.link import TOKEN_METADATA, key_to_proto
from kvtransfer.transports.loading import load_transports
from protos import worker_pb2, worker_pb2_grpc
from tests.kvtransfer.harness import CONFIG, LAYOUT, TOKEN, ReaderThread, eventually

K = ("request", 0)


class RawWriter:
    """Speaks the protocol by hand."""

    def __init__(self, reader: ReaderThread, engine_id: str = "raw"):
        self._channel = grpc.insecure_channel(reader.address)
        self._pending: list[worker_pb2.WriterMessage] = []
        self._ready = threading.Semaphore(0)
        self._call = worker_pb2_grpc.KVLinkStub(self._channel).Link(
            self._messages(), metadata=((TOKEN_METADATA, TOKEN),)
        )
        hello = worker_pb2.WriterHello(
            engine_id=engine_id,
            incarnation=1,
            layouts=[LAYOUT.to_proto()],
            transports=["memory"],
            host_id=load_transports(CONFIG, reader.memory).host_id,
        )
        self.send(worker_pb2.WriterMessage(hello=hello))
        assert not next(self._call).hello.refused

    def _messages(self) -> Iterator[worker_pb2.WriterMessage]:
        while True:
            self._ready.acquire()
            if not self._pending:
                return
            yield self._pending.pop(0)

    def send(self, message: worker_pb2.WriterMessage) -> None:
        self._pending.append(message)
        self._ready.release()

    def begin(self, key: tuple[str, int]) -> None:
        begin = worker_pb2.BeginWrite(key=key_to_proto(key))
        self.send(worker_pb2.WriterMessage(begin=begin))

    def end(self, key: tuple[str, int], **fields: object) -> None:
        end = worker_pb2.EndWrite(key=key_to_proto(key), **fields)  # type: ignore[arg-type]
        self.send(worker_pb2.WriterMessage(end=end))

    def next(self) -> worker_pb2.ReaderMessage:
        return next(self._call)

    def close(self) -> None:
        self._ready.release()
        self._call.cancel()
        self._channel.close()


def test_repeated_stale_and_foreign_messages_are_counted_and_change_nothing() -> None:
    reader = ReaderThread()
    raw, other = RawWriter(reader), RawWriter(reader, "other")
    reader.receiver.expect(("r", 1), [1])
    raw.begin(("r", 0))
    assert not raw.next().grant.granted
    raw.begin(("r", 1))
    assert raw.next().grant.granted
    raw.begin(("r", 1))
    other.begin(("r", 1))
    assert "another writer" in other.next().grant.reason
    other.end(("r", 1), complete=True)
    raw.end(("r", 0), complete=True)
    raw.end(("never", 0), complete=False)
    eventually(lambda: reader.receiver.stats().num_stale == 6)
    reader.assert_no_event()
    raw.end(("r", 1), complete=False, error="changed my mind")
    assert reader.next_event() == KVFailed(
        ("r", 1), "the writer gave up: changed my mind", quiet=True
    )
    raw.end(("r", 1), complete=True)
    eventually(lambda: reader.receiver.stats().num_stale == 7)
    raw.close()
    other.close()
    reader.close()


def test_a_checksum_count_that_is_not_the_layers_is_a_failure() -> None:
    reader = ReaderThread()
    raw = RawWriter(reader)
    reader.receiver.expect(K, [1])
    raw.begin(K)
    assert raw.next().grant.granted
    raw.end(K, complete=True, checksums=[1, 2])
    assert reader.next_event() == KVFailed(K, "2 checksums for 3 layers", quiet=True)
    raw.close()
    reader.close()


def test_what_was_verified_ahead_counts_only_if_the_end_says_the_same() -> None:
    reader = ReaderThread()
    raw = RawWriter(reader)
    reader.memory.k_caches[1][4] = 1.0
    target = LAYOUT.num_heads * LAYOUT.block_size
    runs = HashedRuns([[(4 * target, target, 0)]])
    right = [runs.checksums(reader.memory, layer_idx)[0] for layer_idx in range(3)]
    for number, (ahead, end) in enumerate(((right, right), ([7, 7, 7], right), (right, [7] * 3))):
        key = ("request", number)
        reader.receiver.expect(key, [4])
        raw.begin(key)
        assert raw.next().grant.granted
        progress = worker_pb2.WriteProgress(
            key=key_to_proto(key), layer_idx=[0, 1, 2, 99], checksums=[*ahead, 0]
        )
        raw.send(worker_pb2.WriterMessage(progress=progress))
        raw.end(key, complete=True, checksums=end)
        event = reader.next_event()
        if end == right:
            assert event == KVArrived(key)
        else:
            assert event == KVFailed(key, "checksum of layer 0 does not match", quiet=True)
    raw.close()
    reader.close()


def test_a_broken_link_fails_at_once_and_is_quiet_after_the_grace() -> None:
    reader = ReaderThread()
    raw = RawWriter(reader)
    for key in (K, ("cancelled", 0)):
        reader.receiver.expect(key, [1])
        raw.begin(key)
        assert raw.next().grant.granted
    reader.receiver.cancel(("cancelled", 0))
    assert raw.next().abort.key.request_id == "cancelled"
    start_s = time.monotonic()
    raw.close()
    assert reader.next_event() == KVFailed(K, "the link to the writer broke", quiet=False)
    assert time.monotonic() - start_s < CONFIG.quarantine_grace_s
    reader.receiver.cancel(K)
    assert {reader.next_event(), reader.next_event()} == {KVQuiet(K), KVQuiet(("cancelled", 0))}
    assert time.monotonic() - start_s >= CONFIG.quarantine_grace_s
    reader.assert_no_event()
    reader.close()


def test_a_link_that_does_not_start_with_hello_is_refused() -> None:
    reader = ReaderThread()
    with grpc.insecure_channel(reader.address) as channel:
        begin = worker_pb2.WriterMessage(begin=worker_pb2.BeginWrite(key=key_to_proto(K)))
        call = worker_pb2_grpc.KVLinkStub(channel).Link(
            iter([begin]), metadata=((TOKEN_METADATA, TOKEN),)
        )
        with pytest.raises(grpc.RpcError, match="WriterHello"):
            next(call)
    reader.close()
