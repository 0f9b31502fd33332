"""Compare ways of getting rows to experts and back: `python bench/bench_moe_comm.py`.

Decode steps of a random mixture of experts over `--ranks` processes, tp = ep = ranks, with every
`moe_comm` in turn, several rounds; the rest of the engine (scheduling, sampling) is left out. Bytes
are what one rank sends per sparse layer, counted by the engine's own counters; `formula` is that of
docs/parallel.md for the counted routes, and must be the same number. What is compared is the ratio
of the columns: processes that share cores and memory are no cluster.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from pathlib import Path

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sparse_model import BLOCK_SIZE, model_config

from engine.batch import Batch, BatchBuilder
from engine.collectives import since
from engine.kv_layout import kv_layout
from engine.layers.layer import named_weights, pack_weights
from engine.layers.moe import MoE
from engine.models import build_model
from engine.models.decoder import DecoderForCausalLM
from engine.parallel import Parallel, join, leave
from engine.parallel_config import MoEComm, ParallelConfig
from engine.request import Request, SamplingParams
from engine.scheduler_output import ScheduledRequest
from kernels.ops import select_ops

COMMS: Sequence[MoEComm] = ("allreduce", "zero_redundancy", "allgather")
CONTEXT = 32
SIZE_BYTES = 8  # of a number in the exchange of sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One rank, one way, one round."""

    moe_comm: str
    step_s: float
    num_calls: float
    """Collectives per sparse layer."""
    counted_bytes: float
    """Per sparse layer."""
    remote_rows: float
    """Rows per sparse layer that this rank routes to experts of other ranks."""


class RemoteRows:
    """Counts rows that a router sends to other ranks."""

    def __init__(self, moe: MoE, top_k: int, rank: int) -> None:
        self.num_rows = 0
        self._per_rank = moe.placement.slots_per_rank
        self._top_k = top_k
        self._rank = rank
        moe.gate.register_forward_hook(self._count)

    def _count(self, gate: object, x: object, router_logits: torch.Tensor) -> None:
        experts = router_logits.topk(self._top_k).indices
        self.num_rows += int((experts // self._per_rank != self._rank).sum())


def build(parallel: Parallel, args: argparse.Namespace) -> tuple[DecoderForCausalLM, Batch]:
    """A random model of this rank, and one decode step of it."""
    config, ops = model_config(args), select_ops("auto")
    model = build_model(config, ops, parallel)
    generator = torch.Generator().manual_seed(parallel.config.rank)
    for weight in named_weights(model).values():
        weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    gates = torch.Generator().manual_seed(0)
    for name, weight in named_weights(model).items():
        if name.endswith("gate.weight"):  # the same on all ranks
            weight.copy_(torch.randn(weight.shape, generator=gates))
    pack_weights(model)
    num_blocks = 2 * args.tokens
    shapes = kv_layout(config, BLOCK_SIZE, parallel.config).shapes(num_blocks)
    k_caches, v_caches = ([torch.zeros(s) for _ in range(config.num_layers)] for s in shapes)
    entries = []
    for i in range(args.tokens):
        request = Request(f"{i}", 0, [i % 250] * (CONTEXT + 1), CONTEXT, SamplingParams())
        request.num_computed_tokens, request.block_ids = CONTEXT, [2 * i, 2 * i + 1]
        entries.append(ScheduledRequest(request, 1))
    return model, BatchBuilder(k_caches, v_caches, BLOCK_SIZE).build(entries)


@torch.inference_mode()
def measure(rank: int, folder: str, args: argparse.Namespace, queue: "Queue[Sample]") -> None:
    """Be one rank: every way, in turn."""
    torch.set_num_threads(1)
    for number in range(args.rounds):
        for moe_comm in COMMS:
            config = ParallelConfig(
                tp_size=args.ranks, ep_size=args.ranks, rank=rank, moe_comm=moe_comm
            )
            store = FileStore(f"{folder}/{number}-{moe_comm}", args.ranks)
            parallel = join(config, store)
            model, batch = build(parallel, args)
            for _ in range(3):
                model(batch.input_ids, batch.positions, batch.kv)
            started_s = time.perf_counter()
            for _ in range(args.steps):
                model(batch.input_ids, batch.positions, batch.kv)
            step_s = (time.perf_counter() - started_s) / args.steps
            layers = [m for m in model.modules() if isinstance(m, MoE)]
            counters = [RemoteRows(moe, args.top_k, rank) for moe in layers]
            before = parallel.counters.snapshot()
            model(batch.input_ids, batch.positions, batch.kv)
            counts = since(parallel.counters.snapshot(), before)
            queue.put(
                Sample(
                    moe_comm=moe_comm,
                    step_s=step_s,
                    num_calls=sum(calls for calls, _ in counts.values()) / args.layers,
                    counted_bytes=sum(n for _, n in counts.values()) / args.layers,
                    remote_rows=sum(c.num_rows for c in counters) / args.layers,
                )
            )
            leave()


def formula_bytes(moe_comm: str, remote_rows: float, args: argparse.Namespace) -> float:
    """What one rank sends per sparse layer; the embedding's sum and the last norm's gather too.

    remote_rows: of one rank, on average.
    """
    p, num_bytes, layers = int(args.ranks), int(args.hidden_size) * 4, int(args.layers)
    rows = -(-int(args.tokens) // p) * p  # padded
    part = rows * num_bytes * (p - 1) / p
    sizes = (p - 1) * int(args.experts) // p * SIZE_BYTES
    routed = 2 * remote_rows * num_bytes + sizes
    once = 2 * part / layers  # of the whole model
    if moe_comm == "zero_redundancy":
        return part + routed + part + once
    if moe_comm == "allreduce":
        return 2 * part + routed + part + once
    return 2 * part + 2 * part + once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="of a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--width", type=int, default=128, help="of an expert")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    queue: Queue[Sample] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=measure, args=(rank, folder, args, queue))
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        samples = [queue.get(timeout=200) for _ in range(args.ranks * args.rounds * len(COMMS))]
        for process in ranks:
            process.join(20)
    if args.json:
        print(json.dumps([asdict(sample) for sample in samples]))
        return
    print(f"{args.ranks} ranks, {args.tokens} rows of {args.hidden_size}, {args.layers} layers")
    print("| `moe_comm` | tokens/s | ratio | calls a layer | bytes a layer, counted | formula |")
    print("|---|---|---|---|---|---|")
    first = 0.0
    for moe_comm in COMMS:
        own = [sample for sample in samples if sample.moe_comm == moe_comm]
        rate = args.tokens / statistics.median(sample.step_s for sample in own)
        first = first or rate
        counted = statistics.fmean(sample.counted_bytes for sample in own)
        remote = statistics.fmean(sample.remote_rows for sample in own)
        print(
            f"| `{moe_comm}` | {rate:,.0f} | {rate / first:.2f} | {own[0].num_calls:.1f} | "
            f"{counted:,.0f} | {formula_bytes(moe_comm, remote, args):,.0f} |"
        )


if __name__ == "__main__":
    main()
