"""How cost grows: a decode step with context and batch, a prefill with the prompt; as a plot.

Each panel has the roofline of this machine drawn in, as measured in the same run; see
bench_engine.py. Only attention may grow with the square of the prompt. All sizes take turns in each
round; shown are medians, of times and of the machine's rates.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from worker_engine import BenchEngine, Cost, Machine, default_output

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, ScalarFormatter

CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8176)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096)
CONTEXT, NUM_STEPS = 128, 12


@dataclass(frozen=True, slots=True)
class Panel:
    """One curve and its roofline."""

    title: str
    label: str
    sizes: Sequence[int]
    measure: Callable[[int], float]
    cost: Callable[[int], tuple[float, float]]


def panels(engine: BenchEngine) -> list[Panel]:
    """What is measured."""
    cost = Cost(engine.config, bytes_per_weight=4)

    def by_context(context: int) -> float:
        return engine.decode(1, context, NUM_STEPS).step_s

    def by_batch(batch: int) -> float:
        return engine.decode(batch, CONTEXT, NUM_STEPS).step_s

    return [
        Panel(
            "decode step, batch 1",
            "context, tokens",
            CONTEXTS,
            by_context,
            lambda context: cost.decode(1, context),
        ),
        Panel(
            f"decode step, context {CONTEXT}",
            "batch",
            BATCHES,
            by_batch,
            lambda batch: cost.decode(batch, CONTEXT),
        ),
        Panel("prefill", "prompt, tokens", PROMPTS, engine.prefill_s, cost.prefill),
    ]


def main() -> None:
    """Measure, print, plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=default_output("cost-growth.png"))
    parser.add_argument("-o", "--output", type=Path, default=default_output("bench_growth.json"))
    arguments = parser.parse_args()
    engine = BenchEngine(arguments.model, arguments.threads, kv_cache_bytes=1 << 30)
    engine.decode(1, CONTEXT, NUM_STEPS)
    rates: list[Machine] = []
    times: dict[str, dict[int, list[float]]] = {}
    all_panels = panels(engine)
    for _ in range(arguments.rounds):
        for panel in all_panels:
            for size in panel.sizes:
                rates.append(Machine.measure())
                seconds = panel.measure(size)
                times.setdefault(panel.title, {}).setdefault(size, []).append(seconds)
    machine = Machine(
        statistics.median(rate.bytes_per_s for rate in rates),
        statistics.median(rate.operations_per_s for rate in rates),
    )
    figure, axes = pyplot.subplots(1, len(all_panels), figsize=(15, 4.5), layout="constrained")
    for panel, axis in zip(all_panels, axes, strict=True):
        print(f"\n| {panel.label} | {panel.title}, ms | floor ms | ratio |\n|---|---|---|---|")
        floors = [machine.floor_s(*panel.cost(size)) for size in panel.sizes]
        medians = [statistics.median(times[panel.title][size]) for size in panel.sizes]
        for size, seconds, floor_s in zip(panel.sizes, medians, floors, strict=True):
            ratio = seconds / floor_s
            print(f"| {size} | {seconds * 1e3:.1f} | {floor_s * 1e3:.1f} | {ratio:.2f}x |")
        axis.loglog(panel.sizes, [1e3 * s for s in medians], "o-", label="measured")
        axis.loglog(panel.sizes, [1e3 * s for s in floors], "--", label="roofline")
        axis.set(title=panel.title, xlabel=panel.label, ylabel="ms", xticks=panel.sizes)
        axis.set_xticklabels([str(size) for size in panel.sizes])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.yaxis.set_major_formatter(ScalarFormatter())
        axis.minorticks_off()
        axis.grid(True, which="both", alpha=0.3)
        axis.legend()
    figure.suptitle(
        f"{arguments.model}, float32, {arguments.threads} threads, "
        f"{machine.bytes_per_s / 1e9:.1f} GB/s, {machine.operations_per_s / 1e9:.0f} GFLOP/s, "
        f"medians of {arguments.rounds}"
    )
    arguments.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.plot, dpi=110)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(times, indent=2) + "\n")


if __name__ == "__main__":
    main()
