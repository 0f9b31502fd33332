"""Every control message lost, repeated, delayed and out of order: the right bytes or a clean
failure, nothing held, and the next request is served.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvtransfer.connector import KVArrived, KVFailed, KVQuiet
from tests.kvtransfer.faults import Faults
from tests.kvtransfer.harness import (
    CONFIG,
    ReaderThread,
    Writer,
    assert_blocks_equal,
    assert_untouched,
    eventually,
)
from tests.kvtransfer.relay import BACKWARD, FORWARD, Relay, target_through

K, NEXT = ("request", 0), ("next", 0)
SOURCE, TARGET = [3, 4, 9], [10, 11, 40]
Rig = tuple[Writer, ReaderThread, Relay]


@pytest.fixture
def relayed() -> Iterator[Rig]:
    config = replace(CONFIG, progress_timeout_s=0.8, connect_timeout_s=0.6, report_bytes=1)
    reader = ReaderThread(config)
    relay = Relay(reader.address)
    writer = Writer(config)
    yield writer, reader, relay
    writer.close()
    relay.close()
    reader.close()


def settle(writer: Writer, reader: ReaderThread, *, quiet: bool) -> None:
    """What a decoder does once a request failed or ran out of time; nothing may be left."""
    if not quiet:
        reader.receiver.cancel(K)
        event = reader.next_event()
        while isinstance(event, KVFailed):
            event = reader.next_event()
        assert event == KVQuiet(K)
    stats = reader.receiver.stats()
    assert (stats.num_expected, stats.num_granted, stats.num_quarantined) == (0, 0, 0)
    assert writer.results.empty()


def assert_next_is_served(writer: Writer, reader: ReaderThread, relay: Relay) -> None:
    target = target_through(relay, reader.expect(NEXT, [20, 21]))
    result = writer.send(NEXT, target, [7, 8])
    assert result.ok, result
    assert reader.next_event() == KVArrived(NEXT)
    assert_blocks_equal(writer.memory, [7, 8], reader.memory, [20, 21])


@pytest.mark.parametrize("action", ["drop", "repeat", "delay", "reorder"])
@pytest.mark.parametrize(
    ("direction", "kind"),
    [
        (FORWARD, "hello"),
        (FORWARD, "begin"),
        (FORWARD, "progress"),
        (FORWARD, "end"),
        (BACKWARD, "hello"),
        (BACKWARD, "grant"),
    ],
)
def test_a_message_of_a_transfer_goes_wrong(
    relayed: Rig, direction: str, kind: str, action: str
) -> None:
    writer, reader, relay = relayed
    relay.fault = (direction, kind, action)
    result = writer.send(K, target_through(relay, reader.expect(K, TARGET)), SOURCE)
    eventually(lambda: relay.num_faults == 1)
    if action == "drop" and kind != "progress":
        # Only the loss of the last message goes unnoticed by the writer.
        assert result.ok is (kind == "end"), result
        settle(writer, reader, quiet=False)
    else:
        assert result.ok, result
        assert reader.next_event() == KVArrived(K)
        assert_blocks_equal(writer.memory, SOURCE, reader.memory, TARGET)
        settle(writer, reader, quiet=True)
    assert_next_is_served(writer, reader, relay)
    reader.assert_no_event()


@pytest.mark.parametrize("action", ["drop", "repeat", "delay", "reorder"])
@pytest.mark.parametrize(("direction", "kind"), [(BACKWARD, "abort"), (FORWARD, "end")])
def test_a_message_of_a_cancel_goes_wrong(
    relayed: Rig, direction: str, kind: str, action: str
) -> None:
    writer, reader, relay = relayed
    transfer = writer.begin(K, target_through(relay, reader.expect(K, TARGET)))
    eventually(lambda: reader.receiver.stats().num_granted == 1)
    relay.fault = (direction, kind, action)
    reader.receiver.cancel(K)
    if (kind, action) == ("abort", "drop"):
        # The writer goes on; its blocks stay in quarantine until it ends by itself.
        reader.assert_no_event(0.2)
        writer.push_all(transfer, SOURCE)
        transfer.finish()
        assert writer.next_result().ok
        assert reader.next_event() == KVQuiet(K)
    elif (kind, action) == ("end", "drop"):
        # Quiet once the link is gone; until then nobody may have the blocks.
        assert writer.next_result().error == "the reader gave up"
        reader.assert_no_event(0.2)
        assert reader.receiver.stats().num_quarantined_blocks == len(TARGET)
        writer.sender.close()
        assert reader.next_event() == KVQuiet(K)
        assert_untouched(reader.memory, TARGET)
        return
    else:
        assert writer.next_result().error == "the reader gave up"
        assert reader.next_event() == KVQuiet(K)
        assert_untouched(reader.memory, TARGET)
    settle(writer, reader, quiet=True)
    assert_next_is_served(writer, reader, relay)
    reader.assert_no_event()


def test_a_grant_after_its_own_abort_starts_nothing(relayed: Rig) -> None:
    writer, reader, relay = relayed
    relay.fault = (BACKWARD, "grant", "reorder")
    transfer = writer.begin(K, target_through(relay, reader.expect(K, TARGET)))
    writer.push_all(transfer, SOURCE)
    eventually(lambda: reader.receiver.stats().num_granted == 1)
    reader.receiver.cancel(K)
    assert writer.next_result().error == "the reader gave up"
    assert reader.next_event() == KVQuiet(K)
    assert_untouched(reader.memory, TARGET)
    assert_next_is_served(writer, reader, relay)


def test_a_truncated_payload_is_a_failure_and_the_blocks_are_free(
    rig: tuple[Writer, ReaderThread, Faults],
) -> None:
    writer, reader, faults = rig
    faults.truncate_by = 5
    assert writer.send(K, reader.expect(K, TARGET), SOURCE).ok
    event = reader.next_event()
    assert isinstance(event, KVFailed)
    assert event.quiet
    assert "checksum" in event.reason
    settle(writer, reader, quiet=True)
    assert writer.send(NEXT, reader.expect(NEXT, TARGET), SOURCE).ok
    assert reader.next_event() == KVArrived(NEXT)
    assert_blocks_equal(writer.memory, SOURCE, reader.memory, TARGET)
