"""A prompt of some chunks by one process, by two tensor-parallel ranks and by two stages: tokens/s.

A model of the packaged one's size, with eight heads and random weights, and one thread a rank. All
ways in one run; the ratios are what count. Beside the stages' ratio stands what is left of two
ranks that idle 1 / (m + 1) of the time for m chunks, and the share of the time that they did: 1
minus what they computed over what passed.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.batch import BatchBuilder
from engine.kv_layout import kv_layout
from engine.layers.layer import named_weights, pack_weights
from engine.models import build_model
from engine.models.decoder import DecoderForCausalLM
from engine.parallel import Parallel, join, leave
from engine.parallel_config import ParallelConfig
from engine.request import Request, SamplingParams
from engine.scheduler_output import ScheduledRequest
from engine.stage_link import Arriving
from engine.stages import stage_of
from engine.weights import load_model_config
from kernels.ops import select_ops
from kvtransfer.registration import KVMemory
from pdserve.models import resolve_model

CHUNK, BLOCK_SIZE = 128, 32
NUM_CHUNKS = (1, 2, 4, 8)
NUM_TURNS = 3
WAYS: dict[str, dict[str, Any]] = {"one": {}, "tp 2": {"tp_size": 2}, "pp 2": {"pp_size": 2}}


def measure(rank: int, path: str, options: dict[str, Any], store: str, pipe: Connection) -> None:
    """One rank; sends, by number of chunks, (seconds, seconds of these that it computed)."""
    torch.set_num_threads(1)
    config = ParallelConfig(**options, rank=rank)
    parallel = join(config, dist.FileStore(store, config.world_size))
    ops = select_ops("auto")
    shape = replace(load_model_config(Path(path)), num_heads=8, num_kv_heads=4)
    model = build_model(shape, ops, parallel)
    for weight in named_weights(model).values():
        weight.normal_(0.0, 0.05)
    pack_weights(model)
    layout = kv_layout(model.config, BLOCK_SIZE, parallel.config, ops.cache_dtype)
    memory = KVMemory.allocate(layout, NUM_CHUNKS[-1] * CHUNK // BLOCK_SIZE + ops.num_spare_blocks)
    times = {}
    with torch.inference_mode():
        for num_chunks in NUM_CHUNKS:
            prefill(model, parallel, memory, 1)
            turns = [prefill(model, parallel, memory, num_chunks) for _ in range(NUM_TURNS)]
            times[num_chunks] = tuple(map(statistics.median, zip(*turns, strict=True)))
    pipe.send(times)
    parallel.world.all_reduce(torch.zeros(1))
    leave()


def prefill(
    model: DecoderForCausalLM, parallel: Parallel, memory: KVMemory, num_chunks: int
) -> tuple[float, float]:
    """(seconds until the last chunk's state is back, seconds that this rank computed)."""
    link, config = parallel.link, parallel.config
    stage = stage_of(model.config.num_layers, config)
    builder = BatchBuilder(*memory.paged, BLOCK_SIZE)
    token_ids = [3 + 7 * i % 1000 for i in range(num_chunks * CHUNK)]
    request = Request("bench", 0, token_ids, len(token_ids), SamplingParams())
    request.block_ids = list(range(len(token_ids) // BLOCK_SIZE))
    arriving: deque[Arriving] = deque()
    parallel.world.all_reduce(torch.zeros(1))
    start_s = time.perf_counter()
    waited_s, idle_s = link.waited_s if link else 0.0, 0.0
    for _ in range(num_chunks):
        batch = builder.build([ScheduledRequest(request, CHUNK)])
        hidden = model(batch.input_ids, batch.positions, batch.kv)
        request.num_computed_tokens += CHUNK
        if link is None:
            model.logits(hidden[-1:])
        elif stage.is_last:
            link.send_back(hidden[-1:])
        else:
            arriving.append(link.expect(1, hidden))
            if len(arriving) == config.max_steps_under_way:
                idle_s += finish(model, arriving)
    while arriving:
        idle_s += finish(model, arriving)
    passed_s = time.perf_counter() - start_s
    waited_s = (link.waited_s if link else 0.0) - waited_s
    return passed_s, passed_s - waited_s - idle_s


def finish(model: DecoderForCausalLM, arriving: deque[Arriving]) -> float:
    """Take the oldest state and project it; how long it was waited for."""
    start_s = time.perf_counter()
    state = arriving.popleft().wait()
    waited_s = time.perf_counter() - start_s
    model.logits(state)
    return waited_s


def run(path: str, options: dict[str, Any], folder: Path, name: str) -> list[dict[int, Any]]:
    """What every rank has measured."""
    context = multiprocessing.get_context("spawn")
    world_size = ParallelConfig(**options).world_size
    pipes, ranks = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        args = (rank, path, options, str(folder / name), theirs)
        ranks.append(context.Process(target=measure, args=args, daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    times = [pipe.recv() for pipe in pipes]  # EOFError: a rank died
    for process in ranks:
        process.join()
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    path = str(resolve_model(parser.parse_args().model))
    with tempfile.TemporaryDirectory() as folder:
        found = {
            name: run(path, options, Path(folder), name.replace(" ", ""))
            for name, options in WAYS.items()
        }
    print("chunks   one process   tp 2   pp 2   pp 2 at most   stages idle   by formula")
    for m in NUM_CHUNKS:
        one_s, tp_s, pp_s = (found[name][0][m][0] for name in WAYS)
        # NOTE: the last stage waits for its first rows on the same clock.
        busy_s = sum(rank[m][1] for rank in found["pp 2"])
        idle = 1 - busy_s / (2 * pp_s)
        print(
            f"{m:6}   {m * CHUNK / one_s:7.0f} t/s   {one_s / tp_s:4.2f}   {one_s / pp_s:4.2f}   "
            f"{2 * m / (m + 1):12.2f}   {idle:11.2f}   {1 / (m + 1):10.2f}"
        )


if __name__ == "__main__":
    main()
