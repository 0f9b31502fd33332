"""Transfers from writers that hold some layers each, in stages, through real links."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch

from kvtransfer.connector import BlockCopy, KVArrived, KVFailed, Transfer
from kvtransfer.layout import KVLayout
from kvtransfer.registration import KVMemory
from kvtransfer.reshard import find_writers
from tests.kvtransfer.harness import CONFIG, NUM_BLOCKS, Writer, eventually
from tests.kvtransfer.sharded import MODELS, Engine, K, begin_all, fill, model_values, push_range

NUM_LAYERS = 5
STAGES = (range(2), range(2, 5))
SOURCE_BLOCKS, TARGET_BLOCKS, NUM_TOKENS = [5, 6, 7], [3, 1, 2], 11


def _stage(layout: KVLayout, stage: int, tp_rank: int, tp_size: int) -> KVLayout:
    layers = STAGES[stage]
    return replace(
        layout.for_rank(tp_rank, tp_size),
        num_layers=len(layers),
        first_layer=layers.start,
        total_num_layers=NUM_LAYERS,
        pp_rank=stage,
        pp_size=len(STAGES),
    )


@contextmanager
def _engines(layout: KVLayout, tp_size: int, target_size: int) -> Iterator[tuple]:
    """Writers by stage and rank, filled, and readers with blocks of another size."""
    with ExitStack() as stack:
        engine = Engine(replace(layout, block_size=6), target_size)
        stack.callback(engine.close)
        writers = []
        for stage, layers in enumerate(STAGES):
            for rank in range(tp_size):
                writers.append(Writer(CONFIG, layout=_stage(layout, stage, rank, tp_size)))
                stack.callback(writers[-1].close)
                parts = model_values(layout, NUM_TOKENS)
                own = [part[layers.start : layers.stop] for part in parts]
                fill(writers[-1].memory, SOURCE_BLOCKS, own)
        yield writers, engine


def _write(writers: list[Writer], transfers: list[Transfer]) -> None:
    for writer, transfer in zip(writers, transfers, strict=True):
        push_range(transfer, writer, SOURCE_BLOCKS)
        transfer.finish()


@pytest.mark.parametrize(
    ("name", "tp_size", "target_size"),
    [("eight heads", 2, 1), ("two heads", 1, 2), ("mla", 2, 2), ("int8", 1, 1)],
)
def test_a_reader_has_all_layers_once_every_stage_has_written_its_own(
    name: str, tp_size: int, target_size: int
) -> None:
    layout = replace(MODELS[name], num_layers=NUM_LAYERS)
    with _engines(layout, tp_size, target_size) as (writers, engine):
        target = engine.expect(K, TARGET_BLOCKS, 0, NUM_TOKENS)
        transfers = begin_all(writers, K, target)
        _write(writers[tp_size:], transfers[tp_size:])
        assert all(writer.next_result().ok for writer in writers[tp_size:])
        for reader in engine.readers:
            reader.assert_no_event()
        _write(writers[:tp_size], transfers[:tp_size])
        assert all(writer.next_result().ok for writer in writers[:tp_size])
        for reader in engine.readers:
            assert reader.next_event() == KVArrived(K)
            expected = KVMemory.allocate(reader.memory.layout, NUM_BLOCKS)
            fill(expected, TARGET_BLOCKS, model_values(layout, NUM_TOKENS))
            for ours, theirs in zip(expected.caches, reader.memory.caches, strict=True):
                assert len(ours) == NUM_LAYERS
                for want, got in zip(ours, theirs, strict=True):
                    assert torch.equal(want, got)
            expected.close()


def test_a_stage_that_gives_up_fails_the_transfer() -> None:
    layout = replace(MODELS["two heads"], num_layers=NUM_LAYERS)
    with _engines(layout, 1, 1) as (writers, engine):
        transfers = begin_all(writers, K, engine.expect(K, TARGET_BLOCKS, 0, NUM_TOKENS))
        _write(writers[:1], transfers[:1])
        assert writers[0].next_result().ok
        transfers[1].push(0, [BlockCopy(SOURCE_BLOCKS[0], 0)])
        eventually(lambda: transfers[1].num_bytes > 0)
        transfers[1].abort("its stage is gone")
        assert isinstance(engine.readers[0].next_event(), KVFailed)


def test_every_stage_is_needed_and_no_reader_has_stages() -> None:
    layout = replace(MODELS["eight heads"], num_layers=NUM_LAYERS)
    source = _stage(layout, 1, 0, 4)
    assert find_writers(source, layout.for_rank(1, 2)) == {2, 3, 6, 7}
    with pytest.raises(ValueError, match="num_layers differs: writer 5, reader 3"):
        find_writers(source, _stage(layout, 1, 0, 4))
