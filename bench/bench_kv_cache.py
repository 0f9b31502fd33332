"""The KV cache in float32 and in int8, side by side: decode steps, attention alone, perplexity.

An engine of each, or the kernels on caches of each, in turns in one run; shown are medians and how
many times as fast int8 is. --perplexity compares both on the text of the licence, a fixed one.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from text_perplexity import TEXT, perplexity
from worker_engine import BenchEngine, default_output, duration_s

from engine.config import KVCacheDtype
from engine.kv_layout import kv_layout
from engine.weights import load_model_config
from kernels.kv_cache import KVCache, QuantizedCache
from kernels.ops import select_ops
from pdserve.models import resolve_model
from proxy.tokenizer import load_tokenizer

DTYPES: dict[str, KVCacheDtype] = {"float32": "auto", "int8": "int8"}
LOADS = (
    (1, 256),
    (1, 1024),
    (1, 4096),
    (1, 8000),
    (8, 256),
    (8, 1024),
    (8, 4096),
    (32, 256),
    (32, 1024),
)
BLOCK_SIZE = 32
CACHE_BYTES = 1700 << 20


def bench_decode(model: str, threads: int, rounds: int) -> dict[str, float]:
    """Median ms of each step, by its name; printed as a table."""
    engines = {
        name: BenchEngine(model, threads, kv_cache_dtype=dtype, kv_cache_bytes=CACHE_BYTES)
        for name, dtype in DTYPES.items()
    }
    held = {name: engine.engine.hello.num_blocks for name, engine in engines.items()}
    print(f"blocks in {CACHE_BYTES >> 20} MiB: {held}, {held['int8'] / held['float32']:.2f}x\n")

    def run(batch: int, context: int) -> dict[str, Callable[[], float]]:
        return {
            name: lambda engine=engine: engine.decode(batch, context, 12).step_s
            for name, engine in engines.items()
        }

    print(f"decode steps, {threads} threads")
    return {f"{name} blocks": float(n) for name, n in held.items()} | _table(run, rounds)


@torch.inference_mode()
def bench_attention(model: str, threads: int, rounds: int) -> dict[str, float]:
    """Median ms of the attention of all layers of a decode step; printed as a table."""
    torch.set_num_threads(threads)
    ops, config = select_ops("cpu"), load_model_config(resolve_model(model))

    def run(batch: int, context: int) -> dict[str, Callable[[], float]]:
        blocks = -(-context // BLOCK_SIZE)
        table = torch.randperm(batch * blocks, dtype=torch.int32).view(batch, blocks)
        starts = torch.arange(batch + 1, dtype=torch.int32)
        contexts = torch.full((batch,), context, dtype=torch.int32)
        q = torch.randn(batch, config.num_heads, config.head_dim)

        def attend(caches: list[tuple[KVCache, KVCache]]) -> None:
            for k, v in caches:
                ops.paged_attention(q, k, v, table, starts, contexts, config.head_dim**-0.5, 1)

        def measured(dtype: str) -> Callable[[], float]:
            layout = kv_layout(config, BLOCK_SIZE, dtype=dtype)
            shape = layout.shapes(batch * blocks)[0]
            caches = [
                (_filled(shape, dtype), _filled(shape, dtype)) for _ in range(config.num_layers)
            ]
            return lambda: duration_s(lambda: attend(caches))

        return {name: measured(name) for name in DTYPES}

    print(f"\nattention of all layers, {threads} threads")
    return _table(run, rounds)


def _filled(shape: tuple[int, ...], dtype: str) -> KVCache:
    if dtype == "float32":
        return torch.ones(shape)
    return QuantizedCache(torch.ones(shape, dtype=torch.int8), torch.ones(*shape[:3], 1))


def _table(
    run: Callable[[int, int], dict[str, Callable[[], float]]], rounds: int
) -> dict[str, float]:
    print("| batch | context | float32 ms | int8 ms | times as fast |\n|---|---|---|---|---|")
    results: dict[str, float] = {}
    for batch, context in LOADS:
        contenders = run(batch, context)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds + 1):
            for name, contender in contenders.items():
                times[name].append(1e3 * contender())
        # The first round touches memory for the first time.
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        floats, int8 = medians["float32"], medians["int8"]
        print(
            f"| {batch} | {context} | {floats:.2f} | {int8:.2f} | {floats / int8:.2f} |", flush=True
        )
        results |= {f"{name}, batch {batch}, context {context}": ms for name, ms in medians.items()}
    return results


def bench_perplexity(model: str, num_tokens: int) -> dict[str, float]:
    """Of both caches with weights in float; printed as a table."""
    path, ops = resolve_model(model), select_ops("auto")
    token_ids = load_tokenizer(path).encode(TEXT.read_text())[:num_tokens]
    found = {dtype: perplexity(path, "none", ops, token_ids, cache_dtype=dtype) for dtype in DTYPES}
    print(f"\nperplexity on {TEXT.name}, {len(token_ids)} tokens")
    print("| float32 KV | int8 KV | difference |\n|---|---|---|")
    floats, int8 = found["float32"], found["int8"]
    print(f"| {floats:.4f} | {int8:.4f} | {int8 / floats - 1:+.4%} |", flush=True)
    return {f"perplexity, {dtype}": value for dtype, value in found.items()}


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["decode", "attention", "perplexity"])
    parser.add_argument("--tokens", type=int, default=4096, help="of the text for perplexity")
    parser.add_argument("-o", "--output", type=Path, default=default_output("bench_kv_cache.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results: dict[str, float] = {}
    if arguments.only in (None, "decode"):
        results |= bench_decode(arguments.model, arguments.threads, arguments.rounds)
    if arguments.only in (None, "attention"):
        results |= bench_attention(arguments.model, arguments.threads, arguments.rounds)
    if arguments.only in (None, "perplexity"):
        results |= bench_perplexity(arguments.model, arguments.tokens)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
