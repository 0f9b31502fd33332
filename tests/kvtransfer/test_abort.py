"""Transfers that are given up, by either end and in every phase: who is told what, and when."""

import time
from dataclasses import replace

from kvtransfer.connector import BlockCopy, KVArrived, KVFailed, KVQuiet
from tests.kvtransfer.faults import Faults, faulty
from tests.kvtransfer.harness import (
    CONFIG,
    ReaderThread,
    Writer,
    assert_untouched,
    eventually,
    pair,
)

K = ("request", 0)


def test_abort_before_anything_was_pushed() -> None:
    with pair() as (writer, reader):
        transfer = writer.begin(K, reader.expect(K, [1]))
        eventually(lambda: reader.receiver.stats().num_granted == 1)
        transfer.abort("client left")
        assert writer.next_result().error == "client left"
        transfer.push(0, [BlockCopy(0, 0)])
        transfer.finish()
        transfer.abort("again")
        event = reader.next_event()
        assert isinstance(event, KVFailed)
        assert event.quiet
        reader.assert_no_event()
        assert writer.results.empty()


def test_what_nobody_needs_is_withdrawn_and_no_failure_on_either_side() -> None:
    with pair() as (writer, reader):
        for number, gives_up in enumerate(("writer", "reader", "broken")):
            key = ("request", number)
            transfer = writer.begin(key, reader.expect(key, [1]))
            eventually(lambda: reader.receiver.stats().num_granted == 1)
            if gives_up == "writer":
                transfer.withdraw("the first token ended the request")
                event = reader.next_event()
                assert isinstance(event, KVFailed)
                assert event.withdrawn
                assert event.quiet
            elif gives_up == "reader":
                reader.receiver.cancel(key)
                assert reader.next_event() == KVQuiet(key)
            else:
                transfer.abort("a rank of it failed")
                event = reader.next_event()
                assert isinstance(event, KVFailed)
                assert not event.withdrawn
            assert not writer.next_result().ok
            is_broken = int(gives_up == "broken")
            stats = reader.receiver.stats()
            assert stats.num_withdrawn == 1
            assert stats.failures == ({"incomplete": 1} if is_broken else {})
            assert sum(peer.num_failures for peer in stats.transfers) == is_broken
            assert sum(peer.num_failures for peer in writer.sender.stats()) == is_broken


def test_abort_before_the_link_is_open_asks_for_nothing() -> None:
    with pair() as (writer, reader):
        target = reader.target([1])
        target.link_address = "192.0.2.1:9"
        transfer = writer.begin(K, target)
        transfer.abort("client left")
        assert writer.next_result(1.0).error == "client left"


def test_abort_while_writing_ends_when_the_batch_is_through(
    rig: tuple[Writer, ReaderThread, Faults],
) -> None:
    writer, reader, faults = rig
    faults.gate.clear()
    transfer = writer.begin(K, reader.expect(K, [1]))
    writer.push_all(transfer, [1])
    assert faults.entered.wait(5)
    transfer.abort("client left")
    reader.assert_no_event()
    assert writer.results.empty()
    faults.gate.set()
    assert not writer.next_result().ok
    event = reader.next_event()
    assert isinstance(event, KVFailed)
    assert event.quiet


def test_cancel_before_the_grant_is_quiet_at_once_and_refuses_the_writer() -> None:
    with pair() as (writer, reader):
        target = reader.expect(K, [1])
        reader.receiver.cancel(K)
        assert reader.next_event() == KVQuiet(K)
        result = writer.send(K, target, [1])
        assert "not expected" in result.error
        reader.assert_no_event()
        assert_untouched(reader.memory, [1])
        assert reader.receiver.stats().num_stale == 1


def test_cancel_after_the_grant_waits_for_the_writer_to_let_go(
    rig: tuple[Writer, ReaderThread, Faults],
) -> None:
    writer, reader, faults = rig
    faults.gate.clear()
    transfer = writer.begin(K, reader.expect(K, [1]))
    writer.push_all(transfer, [1])
    assert faults.entered.wait(5)
    reader.receiver.cancel(K)
    reader.receiver.cancel(K)
    reader.assert_no_event(0.2)
    assert reader.receiver.stats().num_quarantined_blocks == 1
    faults.gate.set()
    assert writer.next_result().error == "the reader gave up"
    assert reader.next_event() == KVQuiet(K)
    reader.assert_no_event()
    assert reader.receiver.stats().num_quarantined == 0


def test_cancel_of_an_idle_granted_transfer_ends_it() -> None:
    with pair() as (writer, reader):
        writer.begin(K, reader.expect(K, [1]))
        eventually(lambda: reader.receiver.stats().num_granted == 1)
        reader.receiver.cancel(K)
        assert reader.next_event() == KVQuiet(K)
        assert writer.next_result().error == "the reader gave up"


def test_cancel_after_arrival_and_of_an_unknown_key_is_quiet() -> None:
    with pair() as (writer, reader):
        assert writer.send(K, reader.expect(K, [1]), [1]).ok
        assert reader.next_event() == KVArrived(K)
        reader.receiver.cancel(K)
        assert reader.next_event() == KVQuiet(K)


def test_a_cancel_does_not_wait_for_a_write_that_hangs() -> None:
    faults, reader = Faults(), ReaderThread()
    config = replace(CONFIG, progress_timeout_s=60.0, abort_patience_s=0.1)
    writer = Writer(config, transports=faulty(faults))
    faults.gate.clear()
    transfer = writer.begin(K, reader.expect(K, [1]))
    writer.push_all(transfer, [1])
    assert faults.entered.wait(5)
    start_s = time.monotonic()
    reader.receiver.cancel(K)
    assert writer.next_result().error == "the reader gave up"
    assert reader.next_event() == KVQuiet(K)
    assert time.monotonic() - start_s >= CONFIG.quarantine_grace_s
    writer.close()
    reader.close()


def test_a_failed_write_keeps_the_blocks_until_nothing_can_land(
    rig: tuple[Writer, ReaderThread, Faults],
) -> None:
    writer, reader, faults = rig
    faults.error = "wire cut"
    faults.num_unsettled = 2
    assert writer.send(K, reader.expect(K, [1]), [1]).error == "wire cut"
    reader.receiver.cancel(K)
    reader.assert_no_event(2 * CONFIG.quarantine_grace_s)
    faults.num_unsettled = 0
    assert reader.next_event() == KVQuiet(K)
    faults.error = ""
    assert writer.send(("request", 1), reader.expect(("request", 1), [1]), [1]).ok
