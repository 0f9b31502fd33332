"""A step's linears by our kernels and by what torch offers: `python bench/bench_linears.py`.

The shapes are SmolLM2-135M's, every layer has weights of its own, as they come from memory in a
step. For each number of rows all contenders take turns; shown are medians of all layers' linears
and of the vocabulary's, and how many times ours of as many bits their sum takes. Of a prompt only
the last row meets the vocabulary, so there the layers stand alone. Inputs are cast or transposed
before the time is taken. A contender that is very slow is timed once.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bench_kernels import LINEARS, bench_floors
from torch import Tensor
from torch.nn import functional
from worker_engine import default_output

from engine.layers.quantization import INT4_GROUP_SIZE, quantize_int4, quantize_int8
from kernels.cpu.options import CpuOptions
from kernels.ops import Ops, select_ops
from kernels.quantized import QuantizedWeight

Product = Callable[[Tensor], Tensor]
"""Inputs as a contender wants them -> [rows, out]."""

LIMIT_S = 2.0
"""What takes longer is not taken again."""
LARGEST_ERROR = 0.01
"""Of a product, to that of the weights it stands for; bfloat16 and 8-bit inputs come to half."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight in every number of bits, and the rows that it is packed for."""

    plain: Tensor
    int8: QuantizedWeight
    int4: QuantizedWeight
    num_rows: int

    @classmethod
    def random(cls, out_features: int, in_features: int, num_rows: int) -> "Weight":
        """Normally distributed."""
        plain = torch.randn(out_features, in_features)
        return cls(plain, quantize_int8(plain), quantize_int4(plain, INT4_GROUP_SIZE), num_rows)


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to multiply."""

    bits: int
    pack: Callable[[Weight], Product]
    inputs: Callable[[Tensor], Tensor] = Tensor.contiguous


def pack_mm(weight: Weight) -> Product:
    """The other orientation: inputs are columns."""
    plain = weight.plain
    return lambda columns: torch.mm(plain, columns).t()


def pack_mkl(weight: Weight) -> Product:
    """As inductor packs with MKL."""
    plain, num_rows = weight.plain, weight.num_rows
    packed = torch.ops.mkl._mkl_reorder_linear_weight(plain, num_rows)

    def run(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkl._mkl_linear(x, packed, plain, None, num_rows)
        return result

    return run


def pack_onednn(weight: Weight) -> Product:
    """As inductor packs with oneDNN."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.plain, weight.num_rows)

    def run(x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return result

    return run


def torch_int8(dtype: torch.dtype) -> Contender:
    """A scale per output; dtype: of inputs and scales."""

    def pack(weight: Weight) -> Product:
        values, scale = weight.int8.values, weight.int8.scale.flatten().to(dtype)
        return lambda x: torch._weight_int8pack_mm(x, values, scale)

    return Contender(8, pack, lambda x: x.to(dtype))


def pack_torch_int4(weight: Weight) -> Product:
    """Source: torch.ao; W = (values - 8) * scale + zero, the last two [groups, out] in bfloat16."""
    found, size = weight.int4, weight.int4.group_size
    assert found.offset is not None, "int4 has offsets"
    packed = torch._convert_weight_to_int4pack_for_cpu(found.values.int(), 1)
    zero = found.offset + 8 * found.scale
    factors = torch.stack([found.scale.t(), zero.t()], dim=2).bfloat16().contiguous()
    return lambda x: torch._weight_int4pack_mm_for_cpu(x, packed, size, factors)


def contenders(ops: Ops, short_ops: Ops) -> dict[str, Contender]:
    """All; the first of ours with as many bits is what the others are compared with.

    short_ops: whose inputs of 4-bit products have 8 bits.
    """
    return {
        "float32, ours": Contender(32, lambda w: ops.linear(w.plain, None)),
        "float32, F.linear": Contender(32, lambda w: lambda x: functional.linear(x, w.plain)),
        "float32, torch.mm(W, xT)": Contender(32, pack_mm, lambda x: x.t().contiguous()),
        "float32, MKL packed": Contender(32, pack_mkl),
        "float32, oneDNN packed": Contender(32, pack_onednn),
        "int8, ours": Contender(8, lambda w: ops.quantized_linear(w.int8, None)),
        "int8, torch, bfloat16 inputs": torch_int8(torch.bfloat16),
        "int8, torch, float32 inputs": torch_int8(torch.float32),
        "int4, ours, 16-bit inputs": Contender(4, lambda w: ops.quantized_linear(w.int4, None)),
        "int4, ours, 8-bit inputs": Contender(
            4, lambda w: short_ops.quantized_linear(w.int4, None)
        ),
        "int4, torch, bfloat16 inputs": Contender(4, pack_torch_int4, Tensor.bfloat16),
    }


def available(every: Mapping[str, Contender]) -> dict[str, Contender]:
    """Those that work here; says which do not. Raises: SystemExit: a product is wrong."""
    weight = Weight.random(960, 576, 8)
    x = torch.randn(8, 576)
    plain = {32: weight.plain, 8: weight.int8.dequantize(), 4: weight.int4.dequantize()}
    found = {}
    for name, contender in every.items():
        try:
            result = contender.pack(weight)(contender.inputs(x)).float()
        except (AttributeError, RuntimeError) as error:
            print(f"not here: {name}: {str(error).splitlines()[0]}")
            continue
        expected = x @ plain[contender.bits].t()
        difference = float((result - expected).norm() / expected.norm())
        if difference > LARGEST_ERROR:
            raise SystemExit(f"{name} is off by {difference:.1%} of the product")
        found[name] = contender
    return found


def medians(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median time of each in ms; they take turns."""
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, run in runs.items():
            if number and times[name][0] > 1e3 * LIMIT_S:
                continue
            started_s = time.perf_counter()
            run()
            times.setdefault(name, []).append(1e3 * (time.perf_counter() - started_s))
    # The first time is that of memory which was not touched before.
    return {name: statistics.median(found[1:] or found) for name, found in times.items()}


def bench(
    ways: Mapping[str, Contender], shapes: Sequence[str], num_rows: int, rounds: int
) -> dict[str, float]:
    """All weights of these shapes, one after the other; ms."""
    work: dict[str, list[tuple[Product, Tensor]]] = {name: [] for name in ways}
    for shape in shapes:
        out_features, in_features, count = LINEARS[shape]
        x = torch.randn(num_rows, in_features)
        inputs = {name: way.inputs(x) for name, way in ways.items()}
        for _ in range(count):
            weight = Weight.random(out_features, in_features, num_rows)
            for name, way in ways.items():
                work[name].append((way.pack(weight), inputs[name]))

    def run_all(products: Sequence[tuple[Product, Tensor]]) -> Callable[[], None]:
        def run() -> None:
            for product, x in products:
                product(x)

        return run

    return medians({name: run_all(products) for name, products in work.items()}, rounds)


def print_table(
    ways: Mapping[str, Contender], results: Mapping[str, Sequence[dict[str, float]]]
) -> None:
    """A row for each contender, a column for each number of rows."""
    first = {way.bits: name for name, way in reversed(list(ways.items()))}
    print(f"| ms | {' | '.join(results)} |\n|---|{'---|' * len(results)}")
    for name, way in ways.items():
        cells = []
        for parts in results.values():
            ratio = sum(p[name] for p in parts) / sum(p[first[way.bits]] for p in parts)
            cells.append(f"{' + '.join(f'{p[name]:.1f}' for p in parts)} ({ratio:.2f}x)")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, default=default_output("bench_linears.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ops, short_ops = select_ops("cpu"), select_ops("cpu", cpu=CpuOptions(activation_bits=8))
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{arguments.threads} threads, {capability}, medians of {arguments.rounds} rounds")
    print(f"{bench_floors(1.0)}\n", flush=True)
    ways = available(contenders(ops, short_ops))
    *layers, vocabulary = LINEARS
    results = {}
    for batch in arguments.batches:
        parts = (layers, [vocabulary])
        results[f"batch {batch}, layers + vocabulary"] = [
            bench(ways, shapes, batch, arguments.rounds) for shapes in parts
        ]
    for tokens in arguments.prompts:
        results[f"prompt of {tokens}, layers"] = [bench(ways, layers, tokens, arguments.rounds)]
    print_table(ways, results)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    with torch.inference_mode():
        main()
