"""KV transfer between two processes, next to what the same machine does without us, in one run.

- bandwidth: a transfer (checksums at both ends, KVArrived) over Mooncake against one batch of a
  bare Mooncake engine with the same bytes; over shared memory against memcpy of the same bytes.
- exposed: time from the end of a prompt's compute until its KV has arrived, as a share of the time
  to the first token; pushed layer by layer, and all of it after the end.
"""

import argparse
import asyncio
import ctypes
import itertools
import json
import mmap
import multiprocessing
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import grpc.aio
import torch
from mooncake.engine import TransferEngine

from engine.block_manager import BlockManager
from engine.kv_layout import kv_layout
from engine.models import build_model
from engine.request import Request, SamplingParams
from engine.runner import Runner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.weights import load_model_config, load_weights
from kernels.ops import select_ops
from kvtransfer.config import KVTransferConfig
from kvtransfer.connector import (
    LINK_OPTIONS,
    BlockCopy,
    KVArrived,
    ReceiveEvent,
    Receiver,
    Sender,
    Transfer,
    TransferResult,
)
from kvtransfer.layout import KVLayout
from kvtransfer.registration import KVMemory
from kvtransfer.transports.loading import load_transports
from pdserve.models import resolve_model
from protos import worker_pb2, worker_pb2_grpc

NUM_BLOCKS = 288
BLOCK_SIZE = 32
COPIED_BLOCKS = 128
BARE_SEGMENTS = 1024
"""That the bare engine takes in a batch; it refuses several thousand."""
CHUNK_TOKENS = 512
PROMPTS = (512, 2048, 8064)
TIMEOUT_S = 120.0


def run_reader(pipe: Pipe, layout: KVLayout, config: KVTransferConfig) -> None:
    """The decoder's side: expects what it is told and says when it arrived."""
    memory = KVMemory.allocate(layout, NUM_BLOCKS)
    for part in memory.caches:
        for cache in part:
            cache.zero_()  # a page that was never written would be taken during the copy
    events: queue.Queue[tuple[float, ReceiveEvent]] = queue.Queue()
    transports = load_transports(config, memory)
    receiver = Receiver(
        memory,
        engine_id="reader",
        incarnation=1,
        config=config,
        token="",
        on_event=lambda event: events.put((time.monotonic(), event)),
        transports=transports,
    )
    started: Future[str] = Future()
    stop = threading.Event()

    async def serve() -> None:
        server = grpc.aio.server(options=list(LINK_OPTIONS))
        worker_pb2_grpc.add_KVLinkServicer_to_server(receiver, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        started.set_result(f"127.0.0.1:{port}")
        await asyncio.to_thread(stop.wait)
        await server.stop(0.2)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    endpoint = transports.named(transports.names[0]).endpoint()
    pipe.send((started.result(10), endpoint.SerializeToString()))
    while (command := pipe.recv()) is not None:
        key, blocks = command
        receiver.expect(key, blocks)
        pipe.send(True)
        arrived_s, event = events.get(timeout=TIMEOUT_S)
        assert event == KVArrived(key), event
        pipe.send(arrived_s)
    receiver.close()
    stop.set()
    thread.join(10)
    memory.close()


class Ends:
    """A writer in this process and a reader in another."""

    def __init__(self, memory: KVMemory, config: KVTransferConfig):
        self.memory = memory
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_reader, args=(theirs, memory.layout, config))
        self._process.start()
        address, endpoint = self._pipe.recv()
        self._address: str = address
        self.endpoint = worker_pb2.TransferEndpoint.FromString(endpoint)
        self.sender = Sender(memory, engine_id="writer", incarnation=1, config=config, token="")
        self._results: queue.Queue[TransferResult] = queue.Queue()
        self._count = 0

    def begin(self, blocks: Sequence[int]) -> Transfer:
        """Reserve blocks of the reader and ask for them."""
        self._count += 1
        key = (f"r{self._count}", 0)
        self._pipe.send((key, list(blocks)))
        self._pipe.recv()
        target = worker_pb2.KVTarget(
            engine_id="reader", incarnation=1, link_address=self._address, block_ids=blocks
        )
        return self.sender.begin(key, target, self._results.put)

    def push_all(self, transfer: Transfer, blocks: Sequence[int]) -> None:
        """Push all layers of the blocks and finish."""
        copies = [BlockCopy(block, index) for index, block in enumerate(blocks)]
        for layer_idx in range(self.memory.layout.num_layers):
            transfer.push(layer_idx, copies)
        transfer.finish()

    def arrival_s(self) -> float:
        """When the KV had arrived and was verified, on time.monotonic()."""
        result = self._results.get(timeout=TIMEOUT_S)
        assert result.ok, result
        arrived_s: float = self._pipe.recv()
        return arrived_s

    def close(self) -> None:
        """End both."""
        self.sender.close()
        self._pipe.send(None)
        self._process.join(20)


@contextmanager
def ends(memory: KVMemory, **options: object) -> Iterator[Ends]:
    """A pair of processes with these settings of the transfer."""
    pair = Ends(memory, KVTransferConfig(**options))  # type: ignore[arg-type]
    try:
        yield pair
    finally:
        pair.close()


def filled_memory(layout: KVLayout) -> KVMemory:
    """A cache with something in every page."""
    memory = KVMemory.allocate(layout, NUM_BLOCKS)
    for part in memory.caches:
        for cache in part:
            cache.normal_()
    return memory


def transfer_s(pair: Ends, blocks: Sequence[int]) -> float:
    """From the first push to the arrival; the grant is there before."""
    transfer = pair.begin(blocks)
    time.sleep(0.05)
    started_s = time.monotonic()
    pair.push_all(transfer, blocks)
    return pair.arrival_s() - started_s


def raw_batch(
    memory: KVMemory, endpoint: worker_pb2.TransferEndpoint
) -> Callable[[Sequence[int]], float]:
    """A function that copies blocks of every part with a bare engine, in one batch of the segments
    that a transfer has; in several, where one batch cannot hold them.
    """
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1:0", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.base_address, memory.num_bytes) == 0

    def copy(blocks: Sequence[int]) -> float:
        lists: tuple[list[int], list[int], list[int]] = ([], [], [])
        for ours, theirs in zip(memory.regions, endpoint.regions, strict=True):
            for first, count in runs_of(blocks):
                offset = first * ours.block_bytes
                for values, value in zip(
                    lists,
                    (
                        ours.base_address + offset,
                        theirs.base_address + offset,
                        count * ours.block_bytes,
                    ),
                    strict=True,
                ):
                    values.append(value)
        started_s = time.monotonic()
        for first in range(0, len(lists[0]), BARE_SEGMENTS):
            batch = [values[first : first + BARE_SEGMENTS] for values in lists]
            assert engine.batch_transfer_sync_write(endpoint.address, *batch) == 0
        return time.monotonic() - started_s

    return copy


def runs_of(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(first block, number of blocks) of neighbours; both ends use the same numbers."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


def memcpy(memory: KVMemory) -> Callable[[Sequence[int]], float]:
    """A function that copies the same bytes within this process, run by run, into warm pages."""
    # NOTE: from a page's start: memory that is aligned otherwise takes half as long again.
    target = mmap.mmap(-1, memory.num_bytes)
    anchor = ctypes.c_char.from_buffer(target)
    ctypes.memset(ctypes.addressof(anchor), 1, len(target))

    def copy(blocks: Sequence[int]) -> float:
        runs, to = runs_of(blocks), ctypes.addressof(anchor)
        started_s = time.monotonic()
        for region in memory.regions:
            for first, count in runs:
                address = region.base_address + first * region.block_bytes
                offset = address - memory.base_address
                ctypes.memmove(to + offset, address, count * region.block_bytes)
        return time.monotonic() - started_s

    return copy


def measure_bandwidth(
    layout: KVLayout, runs: int, transports: Sequence[str]
) -> Iterator[tuple[str, list[float]]]:
    """(what, [bare s, ours s, ratio, least and greatest ratio]) of COPIED_BLOCKS blocks; medians.

    A repetition is a bare copy and a transfer right after it; the ratio is taken within each.
    """
    memory = filled_memory(layout)
    together = list(range(COPIED_BLOCKS))
    scattered = list(range(0, 2 * COPIED_BLOCKS, 2))
    for transport, checksum in itertools.product(transports, ("auto", "full")):
        if (transport, checksum) == ("mooncake", "full"):
            continue  # which is what auto stands for
        with ends(memory, transport=transport, checksum=checksum) as pair:
            bare = raw_batch(memory, pair.endpoint) if transport == "mooncake" else memcpy(memory)
            for name, blocks in (("", together), (", no two blocks neighbours", scattered)):
                rows = []
                for _ in range(runs + 2):
                    bare_s = bare(blocks)
                    ours_s = transfer_s(pair, blocks)
                    rows.append((bare_s, ours_s, bare_s / ours_s))
                bare_times, our_times, ratios = zip(*rows[2:], strict=True)
                yield (
                    f"{transport}, checksum {checksum}{name}",
                    [
                        statistics.median(bare_times),
                        statistics.median(our_times),
                        statistics.median(ratios),
                        min(ratios),
                        max(ratios),
                    ],
                )
            del bare
    memory.close()


class Prefiller:
    """A model that computes prompts chunk by chunk into a KV memory."""

    def __init__(self, path: Path, memory: KVMemory):
        config, ops = load_model_config(path), select_ops("auto")
        model = build_model(config, ops)
        load_weights(path, model)
        self._blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self._scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=CHUNK_TOKENS, max_num_seqs=1, prefill_only=True),
            self._blocks,
            eos_token_ids=frozenset(),
        )
        self._runner = Runner(model, memory.k_caches, memory.v_caches, ops, BLOCK_SIZE)

    def run(self, pair: Ends, num_tokens: int, *, by_layer: bool) -> tuple[float, float]:
        """(time to the first token, time from then until the KV arrived) in seconds."""
        request = Request(
            request_id=f"{random.getrandbits(64):x}",
            attempt=0,
            token_ids=[random.randrange(100, 20_000) for _ in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=2, ignore_eos=True),
        )
        num_blocks = self._blocks.num_blocks_for(num_tokens)
        transfer = pair.begin(range(num_blocks))
        started_s = time.monotonic()
        self._scheduler.add(request)
        next_block = 0
        while request.num_computed_tokens < num_tokens:
            (entry,) = self._scheduler.schedule().scheduled
            end = (request.num_computed_tokens + entry.num_tokens) // BLOCK_SIZE
            copies = [BlockCopy(request.block_ids[i], i) for i in range(next_block, end)]
            next_block = end

            def push(layer_idx: int, copies: list[BlockCopy] = copies) -> None:
                transfer.push(layer_idx, copies)

            logits = self._runner.run([entry], push if by_layer else None).logits
            token = int(logits.argmax()) if len(logits) else None
            block_ids = list(request.block_ids)
            self._scheduler.update([entry], [] if token is None else [token])
        computed_s = time.monotonic()
        if by_layer:
            transfer.finish()
        else:
            pair.push_all(transfer, block_ids)
        arrived_s = pair.arrival_s()
        self._scheduler.remove(request)
        return computed_s - started_s, max(arrived_s - computed_s, 0.0)


def measure_exposed(
    path: Path, layout: KVLayout, prompts: Sequence[int], runs: int
) -> Iterator[list[float]]:
    """Rows: prompt tokens, TTFT, exposed by layer, exposed after the end; medians in seconds."""
    memory = KVMemory.allocate(layout, NUM_BLOCKS)
    prefiller = Prefiller(path, memory)
    with ends(memory, transport="mooncake") as pair:
        prefiller.run(pair, prompts[0], by_layer=True)
        for num_tokens in prompts:
            count = max(1, min(runs, 8192 // num_tokens))
            by_layer = [prefiller.run(pair, num_tokens, by_layer=True) for _ in range(count)]
            after = [prefiller.run(pair, num_tokens, by_layer=False) for _ in range(count)]
            yield [
                float(num_tokens),
                statistics.median(ttft for ttft, _ in by_layer),
                statistics.median(exposed for _, exposed in by_layer),
                statistics.median(exposed for _, exposed in after),
            ]
    memory.close()


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS)
    parser.add_argument("--transports", nargs="+", default=["mooncake", "memory"])
    parser.add_argument("--only", choices=["bandwidth", "exposed"])
    parser.add_argument("-o", "--output", type=Path, default=Path("build/bench_transfer.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = resolve_model(arguments.model)
    layout = kv_layout(load_model_config(path), BLOCK_SIZE)
    figures: dict[str, object] = {}
    if arguments.only != "exposed":
        num_bytes = COPIED_BLOCKS * layout.block_bytes_all_layers
        print(f"{num_bytes / 2**20:.0f} MiB, {arguments.runs} repetitions, medians\n")
        print("| | bare copy ms | transfer ms | GiB/s | of the bare copy | least to greatest |")
        print("|---|---|---|---|---|---|")
        bandwidth = {}
        for name, row in measure_bandwidth(layout, arguments.runs, arguments.transports):
            bandwidth[name] = row
            bare_s, ours_s, *ratios = row
            ratio, least, greatest = (100 * value for value in ratios)
            print(
                f"| {name} | {bare_s * 1e3:.0f} | {ours_s * 1e3:.0f} "
                f"| {num_bytes / ours_s / 2**30:.2f} | {ratio:.0f} % "
                f"| {least:.0f} to {greatest:.0f} % |",
                flush=True,
            )
        figures["bandwidth"] = bandwidth
    if arguments.only != "bandwidth":
        print("\n| prompt | TTFT ms | exposed ms, by layer | share | after the end ms | share |")
        print("|---|---|---|---|---|---|")
        rows = []
        for row in measure_exposed(path, layout, arguments.prompts, arguments.runs):
            rows.append(row)
            num_tokens, ttft_s, by_layer_s, after_s = row
            print(
                f"| {num_tokens:.0f} | {ttft_s * 1e3:.0f} | {by_layer_s * 1e3:.1f} "
                f"| {100 * by_layer_s / (ttft_s + by_layer_s):.1f} % | {after_s * 1e3:.1f} "
                f"| {100 * after_s / (ttft_s + after_s):.1f} % |",
                flush=True,
            )
        figures["exposed"] = rows
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
