"""What ranks of a writing and of a reading engine do in tests. Apart from the tests, which import
transformers: every rank imports this.
"""

import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import BatchBuilder
from engine.kv_layout import kv_layout
from engine.models import CausalLM
from engine.parallel import Parallel
from engine.scheduler_output import ScheduledRequest
from kernels.ops import select_ops
from kvtransfer.connector import BlockCopy, KVArrived, Sender, Transfer, TransferResult
from kvtransfer.layout import KVLayout
from kvtransfer.link import RequestKey
from kvtransfer.registration import KVMemory
from protos import worker_pb2
from tests.engine.steps import load, make_request
from tests.kvtransfer.harness import CONFIG, NUM_BLOCKS, TOKEN, ReaderThread
from tests.kvtransfer.sharded import MODELS, fill, model_values

KEY: RequestKey = ("request", 0)
CHUNK = 7
SOURCE_SIZE, TARGET_SIZE = 4, 6
"""Tokens of a block."""
SOURCE_BLOCKS, TARGET_BLOCKS = [40, 3, 4, 5, 9, 11, 10, 20, 21], [7, 8, 30, 2, 1, 9]
PROMPT = [3 + (7 * i + i * i) % 90 for i in range(33)]
TIMEOUT_S = 60.0
Tokens = list[list[Tensor]]
"""By part and layer: [heads of the rank, tokens, width]."""


def send_computed(
    parallel: Parallel, folder: Path, meeting: Path, num_readers: int, transport: str
) -> Tokens:
    """Prefill in chunks, pushing layer by layer; what this rank computed."""
    model = load(folder, select_ops("reference"), parallel)
    memory = KVMemory.allocate(kv_layout(model.config, SOURCE_SIZE, parallel.config), NUM_BLOCKS)
    with _sender(memory, transport) as sending:
        transfer = sending.begin(meeting, num_readers)
        _prefill(model, memory, SOURCE_BLOCKS, SOURCE_SIZE, transfer)
        sending.finish(transfer)
        return _tokens(memory, SOURCE_BLOCKS)


def receive_computed(
    parallel: Parallel, folder: Path, meeting: Path, transport: str
) -> tuple[Tokens, Tokens]:
    """(what arrived, what this rank computes for the same prompt)."""
    model = load(folder, select_ops("reference"), parallel)
    layout = kv_layout(model.config, TARGET_SIZE, parallel.config)
    received = _receive(layout, meeting, transport)
    memory = KVMemory.allocate(layout, NUM_BLOCKS)
    _prefill(model, memory, TARGET_BLOCKS, TARGET_SIZE, None)
    tokens = _tokens(received, TARGET_BLOCKS)
    return tokens, _tokens(memory, TARGET_BLOCKS)


def send_random(
    parallel: Parallel, name: str, meeting: Path, num_readers: int, transport: str
) -> None:
    """Push random KV of the layout of this name."""
    layout = MODELS[name].for_rank(parallel.tp.rank, parallel.tp.size)
    memory = KVMemory.allocate(layout, NUM_BLOCKS)
    fill(memory, SOURCE_BLOCKS, model_values(layout, len(PROMPT)))
    with _sender(memory, transport) as sending:
        transfer = sending.begin(meeting, num_readers)
        for layer_idx in range(layout.num_layers):
            _push(transfer, layer_idx, range(len(SOURCE_BLOCKS)))
        sending.finish(transfer)


def receive_random(parallel: Parallel, name: str, meeting: Path, transport: str) -> bool:
    """Whether every byte of the memory is what it should be."""
    base = replace(MODELS[name], block_size=TARGET_SIZE)
    layout = base.for_rank(parallel.tp.rank, parallel.tp.size)
    received = _receive(layout, meeting, transport)
    expected = KVMemory.allocate(layout, NUM_BLOCKS)
    fill(expected, TARGET_BLOCKS, model_values(layout, len(PROMPT)))
    return all(
        torch.equal(ours, theirs)
        for part, other in zip(expected.caches, received.caches, strict=True)
        for ours, theirs in zip(part, other, strict=True)
    )


class _sender:
    """A Sender whose one transfer has to go well."""

    def __init__(self, memory: KVMemory, transport: str) -> None:
        config = replace(CONFIG, transport=transport, progress_timeout_s=TIMEOUT_S)
        self._results: queue.Queue[TransferResult] = queue.Queue()
        self._sender = Sender(memory, engine_id="writer", incarnation=1, config=config, token=TOKEN)

    def __enter__(self) -> "_sender":
        return self

    def __exit__(self, *_: object) -> None:
        self._sender.close()

    def begin(self, meeting: Path, num_readers: int) -> Transfer:
        """Wait until all readers listen, and ask them."""
        deadline_s = time.monotonic() + TIMEOUT_S
        paths = [meeting / str(rank) for rank in range(num_readers)]
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline_s, "the readers are not ready"
            time.sleep(0.01)
        target = worker_pb2.KVTarget(
            engine_id="reader",
            incarnation=1,
            rank_addresses=[path.read_text() for path in paths],
            block_ids=TARGET_BLOCKS,
            block_size=TARGET_SIZE,
            num_tokens=len(PROMPT),
        )
        return self._sender.begin(KEY, target, self._results.put)

    def finish(self, transfer: Transfer) -> None:
        transfer.finish()
        result = self._results.get(timeout=TIMEOUT_S)
        assert result.ok, result


def _receive(layout: KVLayout, meeting: Path, transport: str) -> KVMemory:
    config = replace(CONFIG, transport=transport, connect_timeout_s=10.0)
    reader = ReaderThread(config, layout=layout)
    reader.receiver.expect(KEY, TARGET_BLOCKS, num_tokens=len(PROMPT))
    # It appears whole, by renaming.
    path = meeting / f".{layout.tp_rank}"
    path.write_text(reader.address)
    path.rename(meeting / str(layout.tp_rank))
    assert reader.next_event(TIMEOUT_S) == KVArrived(KEY)
    memory = KVMemory.allocate(layout, NUM_BLOCKS)
    memory.view[:] = reader.memory.view
    reader.close()
    return memory


@torch.inference_mode()
def _prefill(
    model: CausalLM,
    memory: KVMemory,
    block_ids: Sequence[int],
    block_size: int,
    transfer: Transfer | None,
) -> None:
    request = make_request(PROMPT)
    request.block_ids = list(block_ids)
    builder = BatchBuilder(memory.k_caches, memory.v_caches, block_size)
    next_block = 0
    while request.num_computed_tokens < len(PROMPT):
        count = min(CHUNK, len(PROMPT) - request.num_computed_tokens)
        end = request.num_computed_tokens + count
        end_block = -(-end // block_size) if end == len(PROMPT) else end // block_size
        ready = range(next_block, end_block)
        next_block = end_block

        def push(layer_idx: int, ready: range = ready) -> None:
            if transfer is not None:
                _push(transfer, layer_idx, ready)

        batch = builder.build([ScheduledRequest(request, count)])
        model(batch.input_ids, batch.positions, batch.kv, push)
        request.num_computed_tokens = end


def _push(transfer: Transfer, layer_idx: int, indices: range) -> None:
    wanted = [index for index in indices if index in transfer.block_indices]
    transfer.push(layer_idx, [BlockCopy(SOURCE_BLOCKS[index], index) for index in wanted])


def _tokens(memory: KVMemory, block_ids: Sequence[int]) -> Tokens:
    return [
        [cache[list(block_ids)].transpose(0, 1).flatten(1, 2)[:, : len(PROMPT)] for cache in part]
        for part in memory.caches
    ]
