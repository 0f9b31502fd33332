"""Time the CPU kernels against what torch offers, side by side: `python bench/bench_kernels.py`.

Shapes are SmolLM2-135M's. Every layer has weights of its own, so that they come from memory as in
a decode step. Contenders take turns in each round; shown are medians and ratios to the first.
Set ATEN_CPU_CAPABILITY=avx2 to see a machine without AVX-512. Linears in all precisions that torch
has kernels for, a whole step's at once: bench_linears.py.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels.ops import Ops, select_ops

NUM_LAYERS = 30
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 32
# Sequences that begin alike; not all layers, as 32 of them fill 49 MB in each.
NUM_PREFIX_LAYERS, PREFIX_BLOCK_SIZE = 10, 16
LINEARS = {  # name -> (out_features, in_features, how many)
    "qkv": (960, 576, NUM_LAYERS),
    "o": (576, 576, NUM_LAYERS),
    "gate_up": (3072, 576, NUM_LAYERS),
    "down": (576, 1536, NUM_LAYERS),
    "lm_head": (49152, 576, 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table: one piece of work, its contenders' medians."""

    work: str
    threads: int
    median_ms: Mapping[str, float]
    rate: str
    """What the first contender reaches, in the unit that bounds it."""


def measure(contenders: Mapping[str, Callable[[], object]], budget_s: float) -> dict[str, float]:
    """Median time of each in ms; they alternate until the budget is spent."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    deadline_s = time.perf_counter() + budget_s
    while time.perf_counter() < deadline_s or len(next(iter(times.values()))) < 3:
        for name, run in contenders.items():
            started_s = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - started_s))
    return {name: statistics.median(values) for name, values in times.items()}


def bench_floors(budget_s: float) -> str:
    """What this machine reads from memory and multiplies, as one line."""
    data = torch.ones(128 * 2**20)
    square = torch.ones(1024, 1024)
    times = measure({"read": data.sum, "gemm": lambda: square @ square}, budget_s)
    gigabytes = data.nbytes / times["read"] / 1e6
    return f"read {gigabytes:.1f} GB/s, torch GEMM {2 * 1024**3 / times['gemm'] / 1e6:.0f} GFLOP/s"


def bench_linear(ops: Ops, name: str, batch: int, budget_s: float) -> Row:
    """All layers' weights of one shape, one after the other."""
    out_features, in_features, count = LINEARS[name]
    weights = [torch.randn(out_features, in_features) for _ in range(count)]
    packed = [ops.linear(weight, None) for weight in weights]
    x = torch.randn(batch, in_features)
    x_t = x.t().contiguous()

    def run_ours() -> None:
        for linear in packed:
            linear(x)

    def run_f_linear() -> None:
        for weight in weights:
            functional.linear(x, weight)

    def run_mm() -> None:
        for weight in weights:
            torch.mm(weight, x_t)

    times = measure({"ours": run_ours, "F.linear": run_f_linear, "mm(W, xT)": run_mm}, budget_s)
    size = out_features * in_features * count
    gigabytes, gigaflops = 4 * size / times["ours"] / 1e6, 2 * size * batch / times["ours"] / 1e6
    return Row(
        work=f"{name} x{count}, M={batch}",
        threads=torch.get_num_threads(),
        median_ms=times,
        rate=f"{gigabytes:.1f} GB/s {gigaflops:.0f} GFLOP/s",
    )


def _paged(num_seqs: int, context: int, q_len: int) -> Callable[[Ops], None]:
    """Attention of all layers for num_seqs sequences; each layer has a cache of its own."""
    blocks = -(-context // BLOCK_SIZE)
    shape = (num_seqs * blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(NUM_LAYERS)]
    q = torch.randn(num_seqs * q_len, NUM_HEADS, HEAD_DIM)
    table = torch.randperm(num_seqs * blocks, dtype=torch.int32).view(num_seqs, blocks)
    starts = torch.arange(0, num_seqs * q_len + 1, q_len, dtype=torch.int32)
    contexts = torch.full((num_seqs,), context, dtype=torch.int32)

    def run(backend: Ops) -> None:
        for k, v in caches:
            backend.paged_attention(q, k, v, table, starts, contexts, HEAD_DIM**-0.5, q_len)

    return run


def _paged_alike(num_seqs: int, context: int, common: int) -> dict[str, Callable[[Ops], None]]:
    """Decode attention of sequences that begin alike, in own blocks and in the same ones."""
    blocks, num_common = -(-context // PREFIX_BLOCK_SIZE), common // PREFIX_BLOCK_SIZE
    shape = (num_seqs * blocks, NUM_KV_HEADS, PREFIX_BLOCK_SIZE, HEAD_DIM)
    caches = [(torch.randn(shape), torch.randn(shape)) for _ in range(NUM_PREFIX_LAYERS)]
    q = torch.randn(num_seqs, NUM_HEADS, HEAD_DIM)
    own = torch.randperm(num_seqs * blocks, dtype=torch.int32).view(num_seqs, blocks)
    shared = own.clone()
    shared[:, :num_common] = own[0, :num_common]
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    contexts = torch.full((num_seqs,), context, dtype=torch.int32)

    def over(table: torch.Tensor) -> Callable[[Ops], None]:
        def run(backend: Ops) -> None:
            for k, v in caches:
                backend.paged_attention(q, k, v, table, starts, contexts, HEAD_DIM**-0.5, 1)

        return run

    return {"shared": over(shared), "own": over(own)}


def bench_prefix(ops: Ops, num_seqs: int, context: int, common: int, budget_s: float) -> Row:
    """Decode attention over a prefix in the same blocks against copies of it."""
    runs = _paged_alike(num_seqs, context, common)
    times = measure({name: partial(run, ops) for name, run in runs.items()}, budget_s)
    return Row(
        work=f"prefix N={num_seqs} context={context} common={common}",
        threads=torch.get_num_threads(),
        median_ms=times,
        rate="",
    )


def bench_attention(ops: Ops, num_seqs: int, context: int, q_len: int, budget_s: float) -> Row:
    """Decode (q_len 1) or a prefill chunk at the end of its context, all layers."""
    run = _paged(num_seqs, context, q_len)
    reference = select_ops("reference")
    times = measure({"ours": lambda: run(ops), "reference": lambda: run(reference)}, budget_s)
    kv_bytes = 2 * 4 * num_seqs * context * NUM_KV_HEADS * HEAD_DIM * NUM_LAYERS
    seen = q_len * context - q_len * (q_len - 1) / 2
    flops = 4 * num_seqs * seen * NUM_HEADS * HEAD_DIM * NUM_LAYERS
    rate = f"{kv_bytes / times['ours'] / 1e6:.1f} GB/s {flops / times['ours'] / 1e6:.0f} GFLOP/s"
    return Row(
        work=f"attention N={num_seqs} context={context} q_len={q_len}",
        threads=torch.get_num_threads(),
        median_ms=times,
        rate=rate,
    )


def bench_elementwise(ops: Ops, batch: int, budget_s: float) -> list[Row]:
    """Norm, SiLU-mul and rotary + KV write, once per layer."""
    reference = select_ops("reference")
    x, weight, gate_up = torch.randn(batch, 576), torch.randn(576), torch.randn(batch, 3072)
    qkv = torch.randn(batch, 15, HEAD_DIM)
    q, k, v = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
    cos, sin = torch.randn(batch, HEAD_DIM // 2), torch.randn(batch, HEAD_DIM // 2)
    k_cache = torch.zeros(-(-batch // BLOCK_SIZE), NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    v_cache = k_cache.clone()
    slots = torch.arange(batch, dtype=torch.int32)
    works: dict[str, Callable[[Ops], object]] = {
        "add_rms_norm": lambda o: o.add_rms_norm(x, torch.zeros_like(x), weight, 1e-5),
        "silu_mul": lambda o: o.silu_mul(gate_up),
        "rotary_kv_write": lambda o: o.rotary_kv_write(q, k, v, cos, sin, k_cache, v_cache, slots),
    }

    def layers(work: Callable[[Ops], object], backend: Ops) -> Callable[[], None]:
        def run() -> None:
            for _ in range(NUM_LAYERS):
                work(backend)

        return run

    return [
        Row(
            work=f"{name} x{NUM_LAYERS}, T={batch}",
            threads=torch.get_num_threads(),
            median_ms=measure(
                {"ours": layers(work, ops), "reference": layers(work, reference)}, budget_s
            ),
            rate="",
        )
        for name, work in works.items()
    ]


def format_table(rows: Sequence[Row]) -> str:
    """Rows as text; each contender's ratio to the first in parentheses."""
    lines = []
    for row in rows:
        first = next(iter(row.median_ms.values()))
        cells = [f"{n} {t:8.2f} ms ({t / first:4.2f}x)" for n, t in row.median_ms.items()]
        lines.append(f"{row.threads} thr  {row.work:38} {'  '.join(cells)}  {row.rate}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 1024])
    parser.add_argument("--only", choices=["linear", "attention", "elementwise"])
    parser.add_argument("--budget-s", type=float, default=1.0, help="per line and contender set")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ops = select_ops("cpu")
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        if not args.json:
            print(format_table([row]), flush=True)

    for threads in args.threads:
        torch.set_num_threads(threads)
        if not args.json:
            capability = torch.backends.cpu.get_cpu_capability()
            print(f"{threads} threads, {capability}: {bench_floors(args.budget_s)}")
        for batch in args.batches:
            if args.only in (None, "linear"):
                for name in LINEARS:
                    if name != "lm_head" or batch <= 256:  # prefill needs its last row only
                        show(bench_linear(ops, name, batch, args.budget_s))
            if args.only in (None, "elementwise"):
                for row in bench_elementwise(ops, batch, args.budget_s / 4):
                    show(row)
        if args.only in (None, "attention"):
            for num_seqs, context, q_len in (
                (1, 192, 1),
                (8, 192, 1),
                (32, 192, 1),
                (1, 8192, 1),
                (1, 1024, 1024),
                (1, 4096, 512),
            ):
                show(bench_attention(ops, num_seqs, context, q_len, args.budget_s))
            for num_seqs in (8, 32):
                show(bench_prefix(ops, num_seqs, 1000, 900, args.budget_s))
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.inference_mode():
        main()
