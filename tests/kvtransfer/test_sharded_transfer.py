"""Transfers between engines of several ranks, through real links: every rank has a Sender or a
Receiver of its own.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from kvtransfer.connector import KVArrived, KVFailed, KVQuiet
from kvtransfer.layout import KVLayout
from kvtransfer.registration import KVMemory
from tests.kvtransfer.faults import Faults, faulty
from tests.kvtransfer.harness import CONFIG, NUM_BLOCKS, ReaderThread, Writer
from tests.kvtransfer.sharded import (
    MODELS,
    SIZES,
    Engine,
    K,
    begin_all,
    engines,
    fill,
    model_values,
    push_range,
    writers_of,
)


@pytest.fixture(scope="module", params=MODELS)
def all_sizes(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[KVLayout, dict[int, list[Writer]], dict[int, Engine]]]:
    """Writers and readers of every number of ranks of one model; the readers' blocks are larger."""
    layout = MODELS[request.param]
    writers = {size: writers_of(layout, size) for size in SIZES}
    readers = {size: Engine(replace(layout, block_size=6), size) for size in SIZES}
    yield layout, writers, readers
    for size in SIZES:
        for writer in writers[size]:
            writer.close()
        readers[size].close()


@pytest.mark.parametrize("target_size", SIZES)
@pytest.mark.parametrize("source_size", SIZES)
def test_every_rank_of_the_reader_holds_what_it_would_have_computed(
    all_sizes: tuple[KVLayout, dict[int, list[Writer]], dict[int, Engine]],
    source_size: int,
    target_size: int,
) -> None:
    layout, all_writers, all_readers = all_sizes
    writers, engine = all_writers[source_size], all_readers[target_size]
    num_tokens, first_block = 33, 1
    source_blocks, target_blocks = [40, 3, 4, 5, 9, 11, 10, 20, 21], [7, 8, 30, 2, 1]
    values = model_values(layout, num_tokens)
    for writer in writers:
        for part in writer.memory.caches:
            for cache in part:
                cache.fill_(77)
        fill(writer.memory, source_blocks, values)
    for reader in engine.readers:
        for part in reader.memory.caches:
            for cache in part:
                cache.fill_(55)
    key = (f"{source_size} to {target_size}", 0)
    target = engine.expect(key, target_blocks, first_block, num_tokens)
    transfers = begin_all(writers, key, target)
    for writer, transfer in zip(writers, transfers, strict=True):
        push_range(transfer, writer, source_blocks)
        transfer.finish()
    num_bytes = 0
    for writer in writers:
        result = writer.next_result()
        assert result.ok, result
        num_bytes += result.num_bytes
    slot_bytes = layout.num_layers * sum(part.slot_bytes for part in layout.parts)
    num_slots = sum(reader.memory.layout.num_heads for reader in engine.readers) * 27
    assert num_bytes == slot_bytes * num_slots
    for reader in engine.readers:
        assert reader.next_event() == KVArrived(key)
        expected = KVMemory.allocate(reader.memory.layout, NUM_BLOCKS)
        for part in expected.caches:
            for cache in part:
                cache.fill_(55)
        # The first block is the reader's own; what the fill puts there is not part of the transfer.
        fill(expected, [50, *target_blocks], values)
        for ours, theirs in zip(expected.caches, reader.memory.caches, strict=True):
            for want, got in zip(ours, theirs, strict=True):
                want[50] = 55
                assert torch.equal(want, got)
        expected.close()


@pytest.mark.parametrize(("source_size", "target_size"), [(1, 2), (4, 2)])
def test_equal_block_sizes_move_whole_blocks(source_size: int, target_size: int) -> None:
    layout = MODELS["eight heads"]
    with engines(layout, source_size, layout, target_size) as (writers, engine):
        values = model_values(layout, 12)
        for writer in writers:
            fill(writer.memory, [5, 6, 7], values)
        target = engine.expect(K, [1, 2, 3], 0, 10)
        for writer, transfer in zip(writers, begin_all(writers, K, target), strict=True):
            push_range(transfer, writer, [5, 6, 7])
            transfer.finish()
        assert all(writer.next_result().ok for writer in writers)
        for reader in engine.readers:
            assert reader.next_event() == KVArrived(K)
            expected = KVMemory.allocate(reader.memory.layout, NUM_BLOCKS)
            fill(expected, [1, 2, 3], values)
            assert torch.equal(expected.k_caches[1], reader.memory.k_caches[1])
            expected.close()


def test_of_writers_with_the_same_kv_one_writes_each_rank_of_a_reader() -> None:
    layout, replicas = MODELS["eight heads"], 3
    with ExitStack() as stack:
        engine = Engine(layout, 2)
        stack.callback(engine.close)
        writers = [
            Writer(CONFIG, layout=layout, replica=i, num_replicas=replicas) for i in range(replicas)
        ]
        for writer in writers:
            stack.callback(writer.close)
        sent = [0] * replicas
        for number in range(6):
            key = (f"request-{number}", 0)
            target = engine.expect(key, [1, 2])
            transfers = begin_all(writers, key, target)
            for writer, transfer in zip(writers, transfers, strict=True):
                push_range(transfer, writer, [5, 6])
                transfer.finish()
            results = [writer.next_result() for writer in writers]
            assert all(result.ok for result in results)
            assert sum(result.num_bytes for result in results) == 2 * layout.block_bytes_all_layers
            assert max(result.num_bytes for result in results) == layout.block_bytes_all_layers, (
                "one writer had both ranks of the reader"
            )
            sent = [n + result.num_bytes for n, result in zip(sent, results, strict=True)]
            assert [reader.next_event() for reader in engine.readers] == [KVArrived(key)] * 2
        assert min(sent) > 0, "one of them never wrote"


def test_one_rank_that_gives_up_fails_the_key_and_stops_the_others() -> None:
    layout = MODELS["eight heads"]
    with engines(layout, 4, layout, 1) as (writers, engine):
        (reader,) = engine.readers
        target = engine.expect(K, [1, 2])
        transfers = begin_all(writers, K, target)
        push_range(transfers[0], writers[0], [1, 2])
        transfers[0].finish()
        assert writers[0].next_result().ok
        reader.assert_no_event()
        transfers[1].abort("out of memory")
        event = reader.next_event()
        assert isinstance(event, KVFailed)
        assert "out of memory" in event.reason
        errors = [writer.next_result().error for writer in writers[1:]]
        assert errors[0] == "out of memory"
        assert set(errors[1:]) <= {"the reader gave up"} | {
            "the reader refused: these blocks are not expected (any more)"
        }
        if not event.quiet:
            assert reader.next_event() == KVQuiet(K)
        reader.assert_no_event()
        stats = reader.receiver.stats()
        assert (stats.num_expected, stats.num_granted, stats.num_quarantined) == (0, 0, 0)
        assert stats.failures == {"incomplete": 1}


def test_a_key_is_quiet_only_when_every_rank_is() -> None:
    layout = MODELS["eight heads"].for_rank(0, 2)
    faults = Faults()
    faults.gate.clear()
    reader = ReaderThread(layout=layout.for_rank(0, 1))
    slow = Writer(layout=layout, transports=faulty(faults))
    broken = Writer(layout=layout.for_rank(1, 2))
    target = reader.expect(K, [1, 2])
    push_range(slow.begin(K, target), slow, [1, 2])
    broken.begin(K, target)
    assert faults.entered.wait(5)
    while reader.receiver.stats().num_granted < 1 or len(reader.receiver.stats().transfers) < 2:
        time.sleep(0.01)
    broken.sender.close()
    event = reader.next_event()
    assert isinstance(event, KVFailed)
    assert not event.quiet
    reader.assert_no_event(2 * CONFIG.quarantine_grace_s)
    assert reader.receiver.stats().num_quarantined_blocks == 2
    faults.gate.set()
    assert slow.next_result().error == "the reader gave up"
    assert reader.next_event() == KVQuiet(K)
    reader.assert_no_event()
    for end in (slow, broken, reader):
        end.close()


def test_a_cancel_reaches_every_rank_and_ends_in_one_quiet() -> None:
    layout = MODELS["eight heads"]
    with engines(layout, 4, layout, 2) as (writers, engine):
        begin_all(writers, K, engine.expect(K, [1, 2]))
        for reader in engine.readers:
            while len(reader.receiver.stats().transfers) < 2:
                time.sleep(0.01)
            reader.receiver.cancel(K)
            assert reader.next_event() == KVQuiet(K)
            reader.assert_no_event()
        assert not any(writer.next_result().ok for writer in writers)


def test_ranks_of_two_engines_do_not_fill_one_key() -> None:
    layout = MODELS["eight heads"]
    reader = ReaderThread(layout=layout.for_rank(0, 1))
    ours = Writer(layout=layout.for_rank(0, 2))
    theirs = Writer(layout=layout.for_rank(1, 2), engine_id="other")
    target = reader.expect(K, [1])
    ours.begin(K, target)
    while reader.receiver.stats().num_granted == 0:
        time.sleep(0.01)
    assert "another writer" in theirs.send(K, target, [1]).error
    for end in (ours, theirs, reader):
        end.close()


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_a_failed_transfer() -> None:
    with engines(MODELS["eight heads"], 1, MODELS["eight heads"], 1) as (writers, engine):
        target = engine.expect(K, [1])
        target.rank_addresses.extend([target.link_address] * 2)
        transfer = writers[0].begin(K, target)
        transfer.finish()
        assert "not a multiple" in writers[0].next_result().error
        assert writers[0].results.empty()
