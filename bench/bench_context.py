"""A long prompt by one process, by TP and by context parallelism: `python bench/bench_context.py`.

Random models of one kind of attention each, `--ranks` processes of one thread. The ways take turns
in one run; the ratios are what counts. Bytes are what one rank sends per layer, as the engine's own
counters have them; `formula` is that of docs/parallel.md and must be the same number. The
vocabulary is left out.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.batch import BatchBuilder
from engine.collectives import SingleGroup, since
from engine.config import MLAConfig, ModelConfig
from engine.kv_layout import kv_layout
from engine.layers.layer import named_weights, pack_weights
from engine.models import build_model
from engine.parallel import Parallel, join, leave
from engine.parallel_config import ParallelConfig
from engine.request import Request, SamplingParams
from engine.scheduler_output import ScheduledRequest
from kernels.ops import select_ops

BLOCK_SIZE, VOCAB_SIZE = 32, 256
WAYS = ("one process", "tp", "cp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Of one rank and one round."""

    way: str
    prompt_s: float
    layer_bytes: float
    """What it sent per layer."""


def model_config(args: argparse.Namespace) -> ModelConfig:
    """Llama's or DeepSeek's kind of layer."""
    size = args.hidden_size
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size,
        "intermediate_size": 3 * size,
        "num_layers": args.layers,
        "num_heads": size // 64,
        "max_position_embeddings": args.tokens,
    }
    if args.attention == "gqa":
        return ModelConfig(
            architecture="LlamaForCausalLM", num_kv_heads=size // 256, head_dim=64, **common
        )
    mla = MLAConfig(
        q_lora_rank=size // 2,
        kv_lora_rank=size // 8,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=64,
        softmax_scale=0.125,
    )
    return ModelConfig(
        architecture="DeepseekV3ForCausalLM",
        num_kv_heads=size // 64,
        head_dim=64,
        mla=mla,
        **common,
    )


class Prefill:
    """A random model of this rank, and a prompt for it."""

    def __init__(self, parallel: Parallel, args: argparse.Namespace) -> None:
        config = model_config(args)
        self.parallel = parallel
        self._tokens, self._chunk = int(args.tokens), int(args.chunk)
        self._layers = config.num_layers
        self._model = build_model(config, select_ops("auto"), parallel)
        generator = torch.Generator().manual_seed(0)
        for weight in named_weights(self._model).values():
            weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
        pack_weights(self._model)
        shapes = kv_layout(config, BLOCK_SIZE, parallel.config).shapes(
            -(-args.tokens // BLOCK_SIZE)
        )
        caches = [[torch.zeros(s) for _ in range(args.layers)] for s in shapes]
        self._builder = BatchBuilder(caches[0], caches[1], BLOCK_SIZE)

    @torch.inference_mode()
    def run(self) -> None:
        """All chunks; the state of the last token is read, as in a service."""
        request = Request("r", 0, [i % 250 for i in range(self._tokens)], 1, SamplingParams())
        request.block_ids = list(range(-(-self._tokens // BLOCK_SIZE)))
        while left := self._tokens - request.num_computed_tokens:
            count = min(self._chunk, left)
            batch = self._builder.build([ScheduledRequest(request, count)])
            self.parallel.step.wanted_rows = batch.sample_rows[: left == count]
            self._model(batch.input_ids, batch.positions, batch.kv)
            request.num_computed_tokens += count

    def layer_bytes(self) -> float:
        """What this rank sends for the prompt, over the layers."""
        before = self.parallel.counters.snapshot()
        self.run()
        counts = since(self.parallel.counters.snapshot(), before)
        return sum(num_bytes for _, num_bytes in counts.values()) / self._layers


def ways_of(both: Parallel, num_ranks: int) -> dict[str, Parallel]:
    """The same processes and connections as each way uses them."""
    context = ParallelConfig(cp_size=num_ranks, rank=both.config.rank)
    return {
        "one process": Parallel(),
        "tp": both,
        "cp": replace(both, config=context, tp=SingleGroup(), cp=both.tp),
    }


def measure(rank: int, folder: str, args: argparse.Namespace, queue: "Queue[Sample]") -> None:
    """Be one rank: every way, in turn."""
    torch.set_num_threads(1)
    both = join(ParallelConfig(tp_size=args.ranks, rank=rank), FileStore(f"{folder}/s", args.ranks))
    prefills = {way: Prefill(p, args) for way, p in ways_of(both, args.ranks).items()}
    wait = torch.zeros(1)
    sent = {}
    for number in range(args.rounds + 1):
        for way, prefill in prefills.items():
            both.tp.all_reduce(wait)
            if way == "one process" and rank:
                continue
            if number == 0:  # a warm-up
                sent[way] = prefill.layer_bytes()
                continue
            started_s = time.perf_counter()
            prefill.run()
            prompt_s = time.perf_counter() - started_s
            queue.put(Sample(way=way, prompt_s=prompt_s, layer_bytes=sent[way]))
    both.tp.all_reduce(wait)  # nobody leaves before the others are through
    leave()


def formula_bytes(way: str, args: argparse.Namespace) -> float:
    """What one rank sends per layer; the embedding's sum, or the last states, besides."""
    p, size, layers = int(args.ranks), int(args.hidden_size), int(args.layers)
    share, num_tokens = (p - 1) / p, int(args.tokens)
    if way == "tp":
        return num_tokens * size * share * (16 + 8 / layers)
    row = 2 * (size // 256) * 64 if args.attention == "gqa" else size // 8 + 32
    in_all = 4 * num_tokens * row * share + 4 * size * (p - 1) / layers
    return in_all if way == "cp" else 0.0


def report(samples: Sequence[Sample], args: argparse.Namespace) -> None:
    """Print the table."""
    print(
        f"{args.attention}, {args.ranks} ranks, {args.tokens} tokens in chunks of {args.chunk}, "
        f"{args.layers} layers of {args.hidden_size}"
    )
    print("| way | prompt | of one process | bytes a layer, counted | formula |")
    print("|---|---|---|---|---|")
    alone_s = 0.0
    for way in WAYS:
        own = [sample for sample in samples if sample.way == way]
        prompt_s = statistics.median(sample.prompt_s for sample in own)
        alone_s = alone_s or prompt_s
        print(
            f"| {way} | {prompt_s:.2f} s | {prompt_s / alone_s:.2f} | "
            f"{statistics.fmean(sample.layer_bytes for sample in own):,.0f} | "
            f"{formula_bytes(way, args):,.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", choices=("gqa", "mla"), default="gqa")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512, help="a multiple of 512")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    queue: Queue[Sample] = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=measure, args=(rank, folder, args, queue), daemon=True)
            for rank in range(args.ranks)
        ]
        for process in ranks:
            process.start()
        samples: list[Sample] = []
        while len(samples) < args.rounds * (1 + 2 * args.ranks):
            if any(process.exitcode for process in ranks):
                sys.exit("a rank failed")
            with suppress(Empty):
                samples.append(queue.get(timeout=1.0))
        for process in ranks:
            process.join(20)
    report(samples, args)


if __name__ == "__main__":
    main()
