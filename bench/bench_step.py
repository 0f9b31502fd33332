"""Where the time of a decode step goes: each kernel of its graph, by name.

Kernels are timed one by one in replays of the graph; "linear 0" and so on are the products of a
layer in their order: four of a dense layer, the first of which makes queries, keys and values. The
projection to the vocabulary is not part of the graph. All layers of the model have to be alike.
"""

import argparse
import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import get_args

import torch
from worker_engine import BenchEngine, duration_s

from decoder.graph import GraphRunner
from decoder.native_graph import NativeBackend
from engine.config import Quantization
from engine.models import CausalLM
from engine.runner import ForwardMemory
from engine.weights import load_model_config
from kernels.cpu.options import ActivationBits, CpuOptions
from kernels.ops import Ops
from pdserve.models import resolve_model

ROUNDS = 9


class Profiled:
    """Makes the forward pass of an engine, and keeps what can be profiled."""

    backend: NativeBackend
    model: CausalLM

    def make(self, model: CausalLM, ops: Ops, memory: ForwardMemory) -> GraphRunner:
        """See `engine.runner.MakeForward`."""
        # NOTE: not before an engine has loaded the kernels.
        self.backend, self.model = NativeBackend(), model
        runner = GraphRunner(model, memory, self.backend)
        runner.capture(lambda phase, progress: None)
        return runner


def kernel_name(symbol: str) -> str:
    """The function that a task's lambda was written in."""
    found = re.search(r"(\w+)\(.*\{lambda", symbol.replace("(anonymous namespace)::", ""))
    return found[1] if found else symbol


def kernel_names(symbols: Sequence[str], num_layers: int) -> list[str]:
    """Of the tasks of a step; products by their place in a layer, all of which are alike."""
    names = [kernel_name(symbol).replace("quantized_linear", "linear") for symbol in symbols]
    per_layer, places = names.count("linear") // num_layers, itertools.count()
    return [f"linear {next(places) % per_layer}" if n == "linear" else n for n in names]


@torch.inference_mode()
def vocabulary_s(model: CausalLM, hidden: torch.Tensor) -> float:
    """How long the projection of these states takes."""
    return statistics.median(duration_s(lambda: model.logits(hidden)) for _ in range(ROUNDS))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--quantization", choices=get_args(Quantization), default="none")
    parser.add_argument(
        "--activation-bits",
        type=int,
        choices=get_args(ActivationBits),
        default=8,
        help="of what meets weights of 4 bits",
    )
    arguments = parser.parse_args()
    config = load_model_config(resolve_model(arguments.model))
    if config.moe is not None and (dense := set(range(config.num_layers)) - config.moe.layers):
        parser.error(f"layers {sorted(dense)} are dense, the others have experts")
    profiled = Profiled()
    engine = BenchEngine(
        arguments.model,
        arguments.threads,
        profiled.make,
        kv_cache_bytes=1 << 30,
        max_num_seqs=64,
        quantization=arguments.quantization,
        cpu=CpuOptions(activation_bits=arguments.activation_bits),
    )
    print("| batch | kernel | calls | us a call | ms |\n|---|---|---|---|---|")
    for batch in arguments.batch:
        # NOTE: its last step is still in the buffers that graphs read.
        step_s = engine.decode(batch, arguments.context).step_s
        rounds = [profiled.backend.profile(batch) for _ in range(ROUNDS)]
        times: dict[str, list[float]] = defaultdict(list)
        tasks = list(zip(*rounds, strict=True))
        names = kernel_names([task[0][0] for task in tasks], engine.config.num_layers)
        for name, task in zip(names, tasks, strict=True):
            times[name].append(statistics.median(seconds for _, seconds in task))
        hidden = torch.randn(batch, engine.config.hidden_size)
        times["vocabulary"] = [vocabulary_s(profiled.model, hidden)]
        for name, taken in times.items():
            total = sum(taken)
            print(
                f"| {batch} | {name} | {len(taken)} | {total / len(taken) * 1e6:.1f} "
                f"| {total * 1e3:.2f} |"
            )
        print(f"| {batch} | a step of the engine | 1 | | {step_s * 1e3:.2f} |", flush=True)


if __name__ == "__main__":
    main()
