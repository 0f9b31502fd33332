"""Decode steps in turn and launched ahead (decoder.async_scheduling), one after the other.

In turn: schedule, build, run, sample, serialise. Ahead: the next step is scheduled, built and
launched while one runs on a thread that stands in for the device. Each round takes both with the
same engine; the ratio is the median over the rounds of ahead / in turn. Tokens are the likeliest
ones, or with --sampled drawn as chats draw them.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from worker_engine import GREEDY, SAMPLED, BenchEngine, StepTimes, default_output

BATCHES = (1, 8, 32)
CONTEXT = 96


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("-o", "--output", type=Path, default=default_output("bench_async.json"))
    arguments = parser.parse_args()
    sampling = SAMPLED if arguments.sampled else GREEDY
    engine = BenchEngine(arguments.model, arguments.threads, async_scheduling="on")
    engine.decode(max(BATCHES), CONTEXT)  # the first use of memory is not what is measured
    rows: dict[int, list[tuple[StepTimes, StepTimes]]] = {batch: [] for batch in BATCHES}
    for number in range(arguments.rounds):
        for batch, row in rows.items():
            # Whoever comes second finds the caches as the first one left them: take turns.
            order = (False, True) if number % 2 else (True, False)
            times = {
                way: engine.decode(batch, CONTEXT, sampling=sampling, is_ahead=way) for way in order
            }
            row.append((times[False], times[True]))
    print(f"{arguments.threads} threads, medians of {arguments.rounds} rounds\n")
    print("| batch | in turn ms | not the model ms | ahead ms | ahead / in turn |")
    print("|---|---|---|---|---|")
    for batch, row in rows.items():
        in_turn, other, ahead = (
            1e3 * statistics.median(values)
            for values in (
                [a.step_s for a, _ in row],
                [a.other_s for a, _ in row],
                [b.step_s for _, b in row],
            )
        )
        ratio = statistics.median(b.step_s / a.step_s for a, b in row)
        print(f"| {batch} | {in_turn:.1f} | {other:.2f} | {ahead:.1f} | {ratio:.3f} |")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    found = {n: [(a.step_s, a.other_s, b.step_s) for a, b in row] for n, row in rows.items()}
    arguments.output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
