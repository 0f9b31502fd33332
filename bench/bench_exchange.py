"""A sparse layer whose rows are gathered, against one that sends them by all-to-all: time a pass.

Data-parallel ranks on one machine, the layer of a mixture of 32 experts over them. Both ways take
turns in one run; the ratio is what counts. engine.step_plan chooses between them.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from engine.config import MoEConfig
from engine.layers.layer import named_weights, pack_weights
from engine.layers.moe import MoE
from engine.parallel import join, leave
from engine.parallel_config import ParallelConfig
from engine.step_plan import plan_step
from kernels.ops import select_ops

HIDDEN, EXPERTS = 512, 32
ROWS = (1, 16, 256)
NUM_PASSES, NUM_TURNS = 10, 5


def measure(rank: int, num_ranks: int, top_k: int, store: str, pipe: Connection) -> None:
    """One rank; rank 0 sends rows -> (seconds gathered, seconds by all-to-all)."""
    torch.set_num_threads(1)
    config = ParallelConfig(dp_size=num_ranks, ep_size=num_ranks, rank=rank)
    parallel = join(config, dist.FileStore(store, num_ranks))
    moe = MoE(
        HIDDEN,
        MoEConfig(
            num_experts=EXPERTS,
            num_experts_per_tok=top_k,
            intermediate_size=128,
            norm_topk_prob=True,
            layers=frozenset({0}),
        ),
        ops=select_ops("auto"),
        parallel=parallel,
    )
    generator = torch.Generator().manual_seed(0)
    for weight in named_weights(moe).values():
        weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    pack_weights(moe)
    times: dict[int, tuple[float, float]] = {}
    with torch.inference_mode():
        for num_rows in ROWS:
            x = torch.randn(num_rows, HIDDEN)
            parallel.step.bucket = num_rows
            turns: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(2 * NUM_TURNS):
                parallel.step.gathers = turn % 2 == 0
                moe(x)
                start_s = time.perf_counter()
                for _ in range(NUM_PASSES):
                    moe(x)
                turns[parallel.step.gathers].append((time.perf_counter() - start_s) / NUM_PASSES)
            times[num_rows] = statistics.median(turns[True]), statistics.median(turns[False])
    if rank == 0:
        pipe.send(times)
    leave()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--experts-per-token", type=int, default=4)
    arguments = parser.parse_args()
    num_ranks, top_k = arguments.ranks, arguments.experts_per_token
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe()
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=measure, args=(rank, num_ranks, top_k, store, theirs))
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        theirs.close()
        times = ours.recv()
        for rank in ranks:
            rank.join()
    config = ParallelConfig(dp_size=num_ranks, ep_size=num_ranks)
    print("rows a rank   gathered   all-to-all   ratio   the plan takes")
    for num_rows, (gathered_s, sent_s) in times.items():
        gathers = plan_step([num_rows] * num_ranks, config, top_k).gathers
        print(
            f"{num_rows:11}   {gathered_s * 1e3:5.2f} ms   {sent_s * 1e3:7.2f} ms   "
            f"{gathered_s / sent_s:5.2f}   {'gathered' if gathers else 'all-to-all'}"
        )


if __name__ == "__main__":
    main()
