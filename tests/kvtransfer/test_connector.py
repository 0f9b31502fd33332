import gc
import os
import random
import threading
import time
from dataclasses import replace

import pytest

from kernels.device_queue import Deadline, Wait
from kvtransfer.connector import BlockCopy, KVArrived, KVFailed, KVQuiet
from kvtransfer.errors import TransportUnavailable
from kvtransfer.link import TOKEN_METADATA, is_authorized
from tests.kvtransfer.faults import Faults, faulty
from tests.kvtransfer.harness import (
    CONFIG,
    LAYOUT,
    ReaderThread,
    Writer,
    assert_blocks_equal,
    assert_untouched,
    eventually,
    pair,
)

K = ("request", 0)


@pytest.mark.parametrize("transport", ["memory", "mooncake", "hccl"])
def test_blocks_arrive_and_the_bytes_counted_are_blocks_times_block_bytes(transport: str) -> None:
    with pair(transport=transport) as (writer, reader):
        source, target = [3, 4, 5, 1, 60], [10, 11, 12, 40, 7]
        result = writer.send(K, reader.expect(K, target), source)
        assert result.ok, result
        assert result.num_blocks == 5
        assert result.num_bytes == 5 * LAYOUT.block_bytes_all_layers
        assert reader.next_event() == KVArrived(K)
        assert_blocks_equal(writer.memory, source, reader.memory, target)
        assert_untouched(reader.memory, sorted(set(range(64)) - set(target)))
        for stats in (writer.sender.stats(), reader.receiver.stats().transfers):
            assert [s.transport for s in stats] == [transport]
            assert stats[0].num_bytes == result.num_bytes
            assert (stats[0].num_blocks, stats[0].num_transfers) == (5, 1)


@pytest.mark.parametrize("checksum", ["full", "sampled", "off"])
def test_chunks_may_be_pushed_layer_by_layer_in_any_order(checksum: str) -> None:
    with pair(checksum=checksum) as (writer, reader):
        transfer = writer.begin(K, reader.expect(K, [20, 21, 22, 23]))
        for chunk in ([(2, 1)], [(8, 3), (1, 0)], [(9, 2)]):
            for layer_idx in (2, 0, 1):
                transfer.push(layer_idx, [BlockCopy(*copy) for copy in chunk])
                time.sleep(0.003)
        transfer.finish()
        assert writer.next_result().ok
        assert reader.next_event() == KVArrived(K)
        assert_blocks_equal(writer.memory, [1, 2, 9, 8], reader.memory, [20, 21, 22, 23])


def test_layers_wait_until_they_are_worth_a_batch_or_nothing_more_comes() -> None:
    layer_bytes = LAYOUT.block_bytes_all_layers // LAYOUT.num_layers
    with pair(min_batch_bytes=4 * layer_bytes) as (writer, reader):
        transfer = writer.begin(K, reader.expect(K, [20, 21]))
        copies = [BlockCopy(1, 0), BlockCopy(2, 1)]
        transfer.push(0, copies)
        reader.assert_no_event()
        assert transfer.num_bytes == 0
        transfer.push(1, copies)
        eventually(lambda: transfer.num_bytes == 4 * layer_bytes)
        transfer.push(2, copies)
        reader.assert_no_event()
        assert transfer.num_bytes == 4 * layer_bytes
        transfer.finish()
        assert writer.next_result().ok
        assert reader.next_event() == KVArrived(K)
        assert_blocks_equal(writer.memory, [1, 2], reader.memory, [20, 21])


def test_layers_that_wait_for_more_are_no_lack_of_progress() -> None:
    with pair(min_batch_bytes=1 << 20, progress_timeout_s=0.2) as (writer, reader):
        transfer = writer.begin(K, reader.expect(K, [20]))
        transfer.push(0, [BlockCopy(1, 0)])
        reader.assert_no_event(for_s=0.5)
        for layer_idx in (1, 2):
            transfer.push(layer_idx, [BlockCopy(1, 0)])
        transfer.finish()
        assert writer.next_result().ok
        assert reader.next_event() == KVArrived(K)


def test_a_block_is_read_only_when_the_device_has_computed_it() -> None:
    with pair(checksum="off") as (writer, reader):
        is_computed, caller = threading.Event(), threading.get_ident()
        waiting: set[int] = set()

        def mark() -> Wait:
            assert threading.get_ident() == caller

            def wait(deadline: Deadline) -> bool:
                waiting.add(threading.get_ident())
                return is_computed.wait(5)

            return wait

        writer.memory.mark = mark
        transfer = writer.begin(K, reader.expect(K, [20]))
        writer.push_all(transfer, [5])
        transfer.finish()
        eventually(lambda: bool(waiting))
        assert writer.results.empty()
        for caches in writer.memory.caches:
            for cache in caches:
                cache[5] = 7.0  # what the device writes late
        is_computed.set()
        assert writer.next_result().ok
        assert reader.next_event() == KVArrived(K)
        assert_blocks_equal(writer.memory, [5], reader.memory, [20])
        assert caller not in waiting


def test_a_block_pushed_again_replaces_the_first() -> None:
    with pair() as (writer, reader):
        transfer = writer.begin(K, reader.expect(K, [20]))
        writer.push_all(transfer, [5])
        writer.push_all(transfer, [6])
        transfer.finish()
        assert writer.next_result().ok
        assert reader.next_event() == KVArrived(K)
        assert_blocks_equal(writer.memory, [6], reader.memory, [20])


def test_large_pushes_are_split_into_batches() -> None:
    with pair(max_batch_bytes=5000, max_in_flight_segments=2, transport="mooncake") as (w, r):
        blocks = list(range(1, 64, 2)) + list(range(0, 64, 2))
        assert w.send(K, r.expect(K, blocks), range(64)).ok
        assert r.next_event() == KVArrived(K)
        assert_blocks_equal(w.memory, range(64), r.memory, blocks)


def test_a_target_without_blocks_arrives_at_once() -> None:
    with pair() as (writer, reader):
        assert writer.send(K, reader.expect(K, []), []).ok
        assert reader.next_event() == KVArrived(K)


def test_finishing_with_blocks_missing_is_a_failure_that_names_them() -> None:
    with pair() as (writer, reader):
        transfer = writer.begin(K, reader.expect(K, [1, 2]))
        transfer.push(0, [BlockCopy(1, 0), BlockCopy(2, 1)])
        transfer.push(1, [BlockCopy(1, 0)])
        transfer.finish()
        assert writer.next_result().error == "layer 1: 1 of 2 blocks were pushed"
        event = reader.next_event()
        assert isinstance(event, KVFailed)
        assert event.quiet
        assert "layer 1" in event.reason


def test_pushes_of_what_does_not_exist_are_refused_at_once() -> None:
    with pair() as (writer, reader):
        transfer = writer.begin(K, reader.expect(K, [1]))
        with pytest.raises(ValueError, match="layer_idx is 3"):
            transfer.push(3, [BlockCopy(0, 0)])
        with pytest.raises(ValueError, match="block_index is 1"):
            transfer.push(0, [BlockCopy(0, 1)])
        with pytest.raises(ValueError, match="being transferred"):
            writer.begin(K, reader.target([1]))
        with pytest.raises(ValueError, match="expected already"):
            reader.expect(K, [1])
        with pytest.raises(ValueError, match="block_id is 64"):
            reader.expect(("other", 0), [64])


@pytest.mark.parametrize("blocks", [([64], [3]), ([3], [4096])])
def test_blocks_outside_the_memory_of_either_end_fail_the_transfer(
    blocks: tuple[list[int], list[int]],
) -> None:
    with pair() as (writer, reader):
        reader.receiver.expect(K, [1])
        result = writer.send(K, reader.target(blocks[1]), blocks[0])
        assert "out of range" in result.error
        assert isinstance(reader.next_event(), KVFailed)
        assert_untouched(reader.memory, range(64))


def test_a_flipped_bit_is_a_failure_and_the_blocks_are_free(
    rig: tuple[Writer, ReaderThread, Faults],
) -> None:
    writer, reader, faults = rig
    faults.flip_after_write = True
    assert writer.send(K, reader.expect(K, [1, 2, 3]), [1, 2, 3]).ok
    event = reader.next_event()
    assert isinstance(event, KVFailed)
    assert event.quiet
    assert "checksum" in event.reason
    assert reader.receiver.stats().failures == {"checksum": 1}
    assert writer.send(("request", 1), reader.expect(("request", 1), [1]), [9]).ok
    assert reader.next_event() == KVArrived(("request", 1))


def test_a_write_that_never_lands_is_a_failure(rig: tuple[Writer, ReaderThread, Faults]) -> None:
    writer, reader, faults = rig
    faults.drop_writes = True
    assert writer.send(K, reader.expect(K, [1]), [1]).ok
    assert isinstance(reader.next_event(), KVFailed)


def test_a_transport_that_completes_before_landing_is_given_time() -> None:
    faults = Faults()
    faults.is_landing_guaranteed = False
    faults.late_s = 0.15
    reader = ReaderThread(transports=faulty(faults))
    writer = Writer(transports=faulty(faults))
    assert writer.send(K, reader.expect(K, [1, 2]), [7, 9]).ok
    assert reader.next_event() == KVArrived(K)
    assert_blocks_equal(writer.memory, [7, 9], reader.memory, [1, 2])
    faults.late_s = 1.0
    assert writer.send(("late", 0), reader.expect(("late", 0), [3]), [7]).ok
    assert isinstance(reader.next_event(), KVFailed)
    time.sleep(0.7)
    writer.close()
    reader.close()


def test_a_write_without_progress_fails_in_time(rig: tuple[Writer, ReaderThread, Faults]) -> None:
    writer, reader, faults = rig
    faults.gate.clear()
    start_s = time.monotonic()
    result = writer.send(K, reader.expect(K, [1]), [1])
    assert "deadline" in result.error
    assert time.monotonic() - start_s < CONFIG.progress_timeout_s + 1
    event = reader.next_event()
    assert isinstance(event, KVFailed)
    assert event.quiet


def test_a_slow_prefill_is_no_stall() -> None:
    with pair(progress_timeout_s=0.3) as (writer, reader):
        transfer = writer.begin(K, reader.expect(K, [1]))
        for layer_idx in range(3):
            time.sleep(0.4)
            transfer.push(layer_idx, [BlockCopy(1, 0)])
        time.sleep(0.4)
        transfer.finish()
        assert writer.next_result().ok


def test_a_reader_that_does_not_answer_fails_the_transfer_in_time() -> None:
    with pair() as (writer, reader):
        target = reader.expect(K, [1])
        target.link_address = "127.0.0.1:1"
        start_s = time.monotonic()
        assert "UNAVAILABLE" in writer.send(K, target, [1]).error
        assert time.monotonic() - start_s < 2
        reader.receiver.cancel(K)
        assert reader.next_event() == KVQuiet(K)


def test_a_wrong_token_is_unauthenticated() -> None:
    reader = ReaderThread()
    writer = Writer(token="guess")
    assert "UNAUTHENTICATED" in writer.send(K, reader.expect(K, [1]), [1]).error
    assert reader.receiver.stats().num_expected == 1
    writer.close()
    reader.close()


def test_tokens_are_compared_whole() -> None:
    assert is_authorized([(TOKEN_METADATA, "abc")], "abc")
    assert is_authorized([], "")
    for value in ("", "ab", "abcd", b"abd"):
        assert not is_authorized([(TOKEN_METADATA, value)], "abc")
    assert not is_authorized([("other", "abc")], "abc")


def test_layouts_that_differ_are_refused_with_both_in_the_message() -> None:
    reader = ReaderThread()
    writer = Writer(layout=replace(LAYOUT, head_dim=32))
    error = writer.send(K, reader.expect(K, [1]), [1]).error
    assert "refused" in error
    assert "head_dim=32" in error
    assert "head_dim=16" in error
    writer.close()
    reader.close()


def test_ends_without_a_common_transport_say_what_each_has() -> None:
    reader = ReaderThread(replace(CONFIG, transport="mooncake"))
    writer = Writer(replace(CONFIG, transport="memory"))
    error = writer.send(K, reader.expect(K, [1]), [1]).error
    assert "['memory']" in error
    assert "['mooncake']" in error
    writer.close()
    reader.close()


def test_auto_falls_back_to_mooncake_where_memory_cannot_be_opened(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pair(transport="auto", auto_order=("memory", "mooncake")) as (writer, reader):
        assert writer.sender.transport_names == ["memory", "mooncake"]
        reader.memory.nonce = bytes(32)
        assert writer.send(K, reader.expect(K, [1]), [1]).ok
        assert writer.sender.stats()[0].transport == "mooncake"
        assert "next: ['mooncake']" in caplog.text


def test_a_restarted_reader_is_reached_and_the_old_incarnation_is_not() -> None:
    reader = ReaderThread(incarnation=1)
    writer = Writer()
    assert writer.send(K, reader.expect(K, [1]), [1]).ok
    old_target = reader.target([1])
    port = int(reader.address.rpartition(":")[2])
    reader.close()
    reader = ReaderThread(incarnation=2, port=port)
    assert writer.send(("new", 0), reader.expect(("new", 0), [1]), [2]).ok
    assert reader.next_event() == KVArrived(("new", 0))
    reader.receiver.expect(("old", 0), [1])
    assert "reader/2" in writer.send(("old", 0), old_target, [3]).error
    assert_blocks_equal(writer.memory, [2], reader.memory, [1])
    writer.close()
    reader.close()


def test_a_link_that_broke_is_opened_again() -> None:
    reader = ReaderThread()
    writer = Writer()
    transfer = writer.begin(K, reader.expect(K, [1]))
    eventually(lambda: reader.receiver.stats().num_granted == 1)
    port = int(reader.address.rpartition(":")[2])
    reader.close()
    assert not writer.next_result().ok
    transfer.push(0, [BlockCopy(0, 0)])
    reader = ReaderThread(port=port)
    assert writer.send(("again", 0), reader.expect(("again", 0), [1]), [2]).ok
    writer.close()
    reader.close()


def test_a_closed_sender_fails_what_is_under_way_and_starts_nothing() -> None:
    reader = ReaderThread()
    writer = Writer()
    writer.begin(K, reader.expect(K, [1]))
    eventually(lambda: reader.receiver.stats().num_granted == 1)
    writer.close()
    assert "closed" in writer.next_result().error
    with pytest.raises(RuntimeError, match="closed"):
        writer.begin(("other", 0), reader.target([1]))
    event = reader.next_event()
    assert isinstance(event, KVFailed)
    assert not event.quiet
    assert reader.next_event() == KVQuiet(K)
    reader.close()


def test_a_transport_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake.engine", None)
    monkeypatch.delitem(__import__("sys").modules, "kvtransfer.transports.mooncake", raising=False)
    with pytest.raises(TransportUnavailable, match="mooncake: cannot import mooncake"):
        Writer(replace(CONFIG, transport="mooncake"))
    writer = Writer(replace(CONFIG, transport="auto"))
    assert writer.sender.transport_names == ["memory"]
    writer.close()


MANY = pytest.mark.slow


@pytest.mark.parametrize(
    ("transport", "count"),
    [
        ("memory", 200),
        ("mooncake", 200),
        ("hccl", 200),
        pytest.param("memory", 10_000, marks=MANY),
        pytest.param("mooncake", 10_000, marks=MANY),
    ],
)
def test_transfers_with_aborts_leave_nothing_behind(transport: str, count: int) -> None:
    rng = random.Random(3)
    with pair(transport=transport) as (writer, reader):
        assert writer.send(K, reader.expect(K, [0]), [0]).ok
        assert reader.next_event() == KVArrived(K)
        outcomes = {"arrived": 0, "failed": 0, "quiet": 0}
        for i in range(count):
            if i == count // 4:  # Mooncake has opened its sockets by now.
                gc.collect()
                num_fds = len(os.listdir("/proc/self/fd"))
                num_threads = threading.active_count()
                resident_bytes = resident()
            key = (f"r{i}", 0)
            blocks = rng.sample(range(64), 6)
            transfer = writer.begin(key, reader.expect(key, blocks))
            fate = rng.choice(["abort", "cancel"]) if rng.random() < 0.1 else "finish"
            num_layers = 3 if fate == "finish" else rng.randrange(4)
            for layer_idx in range(num_layers):
                transfer.push(layer_idx, [BlockCopy(block, j) for j, block in enumerate(blocks)])
            if fate == "finish":
                transfer.finish()
            elif fate == "abort":
                transfer.abort("test")
            else:
                reader.receiver.cancel(key)
            result = writer.next_result()
            event = reader.next_event()
            assert result.ok is (fate == "finish"), result
            expected = {"finish": KVArrived, "abort": KVFailed, "cancel": KVQuiet}[fate]
            assert isinstance(event, expected), (fate, event)
            outcomes[{"finish": "arrived", "abort": "failed", "cancel": "quiet"}[fate]] += 1
        assert min(outcomes.values()) > 3, outcomes
        stats = reader.receiver.stats()
        assert (stats.num_expected, stats.num_granted, stats.num_quarantined) == (0, 0, 0)
        assert stats.num_arrived == outcomes["arrived"] + 1
        reader.assert_no_event()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= num_fds
        assert threading.active_count() == num_threads
        # Allocators keep some pages; a leak of one key per transfer would be far more.
        assert resident() - resident_bytes < max(count * 200, 8 << 20)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_many_transfers_at_once_from_two_writers_to_two_readers_all_pairs() -> None:
    readers = [ReaderThread(), ReaderThread()]
    writers = [Writer(engine_id="w0"), Writer(engine_id="w1")]
    keys = {}
    for i in range(40):
        writer, reader = writers[i % 2], readers[i // 2 % 2]
        key = (f"r{i}", 0)
        first_block = (i // 4 * 2 + i % 2) * 2
        target = reader.expect(key, [first_block, first_block + 1])
        transfer = writer.begin(key, target)
        writer.push_all(transfer, [i, i + 1])
        transfer.finish()
        keys[key] = reader
    for writer in writers:
        assert all(writer.next_result().ok for _ in range(20))
    arrived = {reader.next_event() for reader in readers for _ in range(20)}
    assert arrived == {KVArrived(key) for key in keys}
    for reader in readers:
        assert {s.peer_engine_id for s in reader.receiver.stats().transfers} == {"w0", "w1"}
        assert all(s.num_transfers == 10 for s in reader.receiver.stats().transfers)
    for end in (*writers, *readers):
        end.close()


def test_no_thread_is_left_after_close() -> None:
    with pair() as (writer, reader):
        assert writer.send(K, reader.expect(K, [1]), [1]).ok
    eventually(lambda: not [t for t in threading.enumerate() if t.name.startswith("kv-")])


def test_a_reader_that_neither_grants_nor_refuses_is_left_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pair(progress_timeout_s=0.4) as (writer, reader):
        begin = reader.receiver._begin
        monkeypatch.setattr(reader.receiver, "_begin", lambda *_: None)
        assert "waiting for a grant" in writer.send(K, reader.expect(K, [1]), [1]).error
        monkeypatch.setattr(reader.receiver, "_begin", begin)
        assert writer.send(("again", 0), reader.expect(("again", 0), [2]), [1]).ok
