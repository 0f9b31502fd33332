"""The engine alone, one process, against the floor that this machine sets in the same run.

Decode: a step must read every weight once (bytes / bandwidth) and compute every product
(operations / rate); the floor is the larger. Prefill: operations / rate. Bandwidth is that of a
read-only sum, the rate that of a large float32 matrix product, both with the same threads.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from decoder.graph import graph_forward
from engine.colocated import ColocatedEngine
from engine.config import ModelConfig
from engine.models import build_model
from engine.request import Request, SamplingParams
from engine.scheduler import SchedulerConfig
from engine.weights import load_model_config, load_weights
from kernels.ops import select_ops
from pdserve.models import resolve_model

BATCHES = (1, 8, 32)
CONTEXT = 64
NUM_STEPS = 24
PREFILL_TOKENS = 1024


def median_s(function: Callable[[], object], runs: int = 7) -> float:
    """Median duration after one run that is not counted."""
    function()
    times = []
    for _ in range(runs):
        started_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def measure_machine() -> tuple[float, float]:
    """(bytes/s of a read-only sum, float32 operations/s of a matrix product)."""
    numbers = torch.randn(64 << 20)
    bandwidth = numbers.nbytes / median_s(lambda: numbers.sum())
    square = torch.randn(2048, 2048)
    return bandwidth, 2 * 2048**3 / median_s(lambda: square @ square)


def num_matrix_weights(config: ModelConfig) -> tuple[int, int]:
    """(weights of all layers' linears, weights of the projection to the vocabulary)."""
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * layer, config.hidden_size * config.vocab_size


def make_requests(count: int, num_tokens: int, max_tokens: int) -> list[Request]:
    """Random prompts that share nothing, with one another or with earlier ones."""
    generator = random.Random()
    return [
        Request(
            request_id=f"{generator.getrandbits(64):x}",
            attempt=0,
            token_ids=[generator.randrange(100, 20_000) for _ in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        for _ in range(count)
    ]


def decode_step_s(engine: ColocatedEngine, batch: int) -> float:
    """Median time of a step in which `batch` requests decode."""
    for request in make_requests(batch, CONTEXT, NUM_STEPS + 1):
        engine.scheduler.add(request)
    times = []
    while engine.scheduler.has_work:
        started_s = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[-NUM_STEPS:])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--graph-mode", default="auto")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/bench_engine.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = resolve_model(arguments.model)
    config, ops = load_model_config(path), select_ops(arguments.ops)
    model = build_model(config, ops)
    load_weights(path, model)
    engine = ColocatedEngine(
        model,
        ops,
        num_blocks=512,
        block_size=32,
        scheduler_config=SchedulerConfig(max_num_batched_tokens=2048),
        make_forward=graph_forward(arguments.graph_mode, lambda phase, progress: None),
    )
    bandwidth, rate = measure_machine()
    layers, head = num_matrix_weights(config)
    print(f"{arguments.threads} threads, {ops.name} ops, {bandwidth / 1e9:.1f} GB/s, ", end="")
    print(f"{rate / 1e9:.0f} GFLOP/s\n\n| | measured ms | floor ms | ratio |\n|---|---|---|---|")
    rows = {}
    for batch in BATCHES:
        floor_s = max(4 * (layers + head) / bandwidth, 2 * batch * (layers + head) / rate)
        rows[f"decode step, batch {batch}"] = (decode_step_s(engine, batch), floor_s)

    def prefill() -> float:
        started_s = time.perf_counter()
        engine.generate(make_requests(1, PREFILL_TOKENS, 1))
        return time.perf_counter() - started_s

    attention = 2 * PREFILL_TOKENS**2 * config.num_heads * config.head_dim * config.num_layers
    prefill_floor_s = (2 * PREFILL_TOKENS * layers + 2 * head + attention) / rate
    rows[f"prefill of {PREFILL_TOKENS}"] = (median_s(prefill, runs=3), prefill_floor_s)
    for name, (measured_s, floor_s) in rows.items():
        ratio = measured_s / floor_s
        print(f"| {name} | {measured_s * 1e3:.1f} | {floor_s * 1e3:.1f} | {ratio:.2f}x |")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
