"""Steps in two halves against steps in one: `python bench/bench_dual_batch.py`.

A random mixture of experts over `--ranks` processes, tp = ep = ranks, one thread each; decode steps
and chunks of prompts, both ways in turn, in one run. What is compared is the ratio. On one machine
there is hardly a network to wait for, so `--latency-us` adds one: every collective takes at least
that long, asleep, which is time that the other half can use. The rest is the engine's own code.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sparse_model import BLOCK_SIZE, model_config

from engine.batch import Batch, BatchBuilder
from engine.collectives import CollectiveCounters, Group, ProcessGroup
from engine.dual_batch import cut_of
from engine.kv_layout import kv_layout
from engine.layers.layer import named_weights, pack_weights
from engine.models import build_model
from engine.parallel import Parallel
from engine.parallel_config import ParallelConfig
from engine.request import Request, SamplingParams
from engine.scheduler_output import ScheduledRequest
from engine.turns import Pending, Turns
from kernels.ops import select_ops


class SlowNetwork:
    """Makes what goes between ranks take at least `latency_s`."""

    def __init__(self) -> None:
        self.latency_s = 0.0

    def sleep_since(self, started_s: float) -> None:
        """Until `latency_s` after `started_s`."""
        left_s = started_s + self.latency_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class SlowTurns(Turns):
    """Of halves on a slow network."""

    def __init__(self, network: SlowNetwork) -> None:
        super().__init__()
        self._network = network

    def wait(self, pending: Pending) -> None:
        """See Turns."""
        started_s = time.perf_counter()
        super().wait(pending)
        self._network.sleep_since(started_s)


class SlowGroup:
    """A group on a slow network; in halves, SlowTurns waits in its place."""

    def __init__(self, group: ProcessGroup, network: SlowNetwork, turns: Turns) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._network, self._turns = group, network, turns

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Group."""
        return self._timed(lambda: self._group.all_reduce(x))

    def all_gather(self, x: Tensor) -> Tensor:
        """See Group."""
        return self._timed(lambda: self._group.all_gather(x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See Group."""
        return self._timed(lambda: self._group.reduce_scatter(x))

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """See Group."""
        return self._timed(lambda: self._group.all_to_all(x, sent, received))

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See Group."""
        return self._timed(lambda: self._group.broadcast(x, source))

    def _timed(self, call: Callable[[], Tensor]) -> Tensor:
        started_s, is_whole = time.perf_counter(), not self._turns.are_shared
        out = call()
        if is_whole:
            self._network.sleep_since(started_s)
        return out


def _batch(caches: tuple[list[Tensor], list[Tensor]], num_seqs: int, num_tokens: int) -> Batch:
    """num_tokens of each sequence, after one block of context."""
    entries, size = [], -(-num_tokens // BLOCK_SIZE) + 1
    for i in range(num_seqs):
        token_ids = [i % 250] * (BLOCK_SIZE + num_tokens)
        request = Request(f"{i}", 0, token_ids, BLOCK_SIZE, SamplingParams())
        request.num_computed_tokens = BLOCK_SIZE
        request.block_ids = list(range(i * size, (i + 1) * size))
        entries.append(ScheduledRequest(request, num_tokens))
    return BatchBuilder(*caches, BLOCK_SIZE).build(entries)


@torch.inference_mode()
def measure(rank: int, store: str, args: argparse.Namespace, pipe: Connection) -> None:
    """Be one rank; rank 0 sends a row per kind of step and latency."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, args.ranks), rank=rank, world_size=args.ranks
    )
    network, counters = SlowNetwork(), CollectiveCounters()
    turns = SlowTurns(network)
    groups: list[Group] = [
        SlowGroup(ProcessGroup(name, dist.new_group(), counters, turns), network, turns)
        for name in ("tp", "ep")
    ]
    config = ParallelConfig(
        tp_size=args.ranks, ep_size=args.ranks, rank=rank, dual_batch_overlap=True
    )
    parallel = Parallel(config=config, tp=groups[0], ep=groups[1], counters=counters, turns=turns)
    shape = model_config(args)
    model = build_model(shape, select_ops("auto"), parallel)
    for name, weight in named_weights(model).items():
        seed = 0 if name.endswith("gate.weight") else rank
        generator = torch.Generator().manual_seed(seed)
        weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    pack_weights(model)
    steps = {"decode": (args.tokens, 1), "prefill": (2, args.prompt_tokens // 2)}
    for kind, (num_seqs, num_tokens) in steps.items():
        num_blocks = num_seqs * (-(-num_tokens // BLOCK_SIZE) + 1)
        sizes = kv_layout(shape, BLOCK_SIZE, parallel.config).shapes(num_blocks)
        k_caches, v_caches = ([torch.zeros(s) for _ in range(shape.num_layers)] for s in sizes)
        batch = _batch((k_caches, v_caches), num_seqs, num_tokens)
        rows, cut = len(batch.input_ids), cut_of(batch.kv.cu_seqlens_q)
        for latency_us in args.latency_us:
            network.latency_s = latency_us / 1e6
            times: dict[int, list[float]] = {0: [], cut: []}
            for _ in range(args.turns):
                for parallel.step.cut in (0, cut):
                    model(batch.input_ids, batch.positions, batch.kv)
                    started_s = time.perf_counter()
                    for _ in range(args.steps):
                        model(batch.input_ids, batch.positions, batch.kv)
                    times[parallel.step.cut].append((time.perf_counter() - started_s) / args.steps)
            if rank == 0:
                one_s, two_s = (statistics.median(times[key]) for key in (0, cut))
                pipe.send((kind, rows, latency_us, rows / one_s, rows / two_s))
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="of a decode step")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of a prefill step")
    parser.add_argument("--latency-us", type=int, nargs="*", default=[0, 500, 2000, 5000])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--width", type=int, default=256, help="of an expert")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe()
        ranks = [
            context.Process(target=measure, args=(rank, f"{folder}/store", args, theirs))
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        theirs.close()
        print("| step | rows | latency | tokens/s in one | in two halves | ratio |")
        print("|---|---|---|---|---|---|")
        for _ in range(2 * len(args.latency_us)):
            kind, rows, latency_us, one, two = ours.recv()
            print(
                f"| {kind} | {rows} | {latency_us / 1e3:g} ms | {one:,.0f} | {two:,.0f} | "
                f"{two / one:.2f} |"
            )
        for process in ranks:
            process.join(20)


if __name__ == "__main__":
    main()
