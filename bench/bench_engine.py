"""The engine of one worker against the floor that this machine sets in the same run.

Decode: a step must read every weight, and the keys and values of every context, once (bytes /
bandwidth), and compute every product (operations / rate); the floor is the larger. Prefill:
operations / rate. The floor of a decode step's weights alone stands beside it. Bandwidth and rate
are taken again before every row: the machine may be shared.
"not the model" is what scheduling, batch building, sampling and messages take of a step. Rows are
greedy, but for those that say "sampled": temperature, top_k and top_p as chats have them.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from worker_engine import GREEDY, SAMPLED, BenchEngine, Cost, Machine, default_output

DECODES = [  # batch, name, how tokens are chosen
    (1, "", GREEDY),
    (1, ", sampled", SAMPLED),
    (8, "", GREEDY),
    (32, "", GREEDY),
    (32, ", sampled", SAMPLED),
]
CONTEXT = 96
PREFILL_TOKENS = 1024


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--ops", default="auto")
    parser.add_argument("--graph-mode", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, default=default_output("bench_engine.json"))
    arguments = parser.parse_args()
    engine = BenchEngine(
        arguments.model,
        arguments.threads,
        ops_backend=arguments.ops,
        graph_mode=arguments.graph_mode,
    )
    cost = Cost(engine.config, bytes_per_weight=4)
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    for _ in range(arguments.rounds):
        for batch, name, sampling in DECODES:
            machine = Machine.measure()
            floor_s = machine.floor_s(*cost.decode(batch, CONTEXT))
            weights_s = machine.floor_s(*cost.decode_weights(batch))
            times = engine.decode(batch, CONTEXT, sampling=sampling)
            kv_mb = cost.kv_bytes(batch, CONTEXT) / 1e6
            row = rows.setdefault(f"decode step, batch {batch}{name}, {kv_mb:.0f} MB of KV", [])
            row.append((times.step_s, floor_s, weights_s, times.other_s))
        floor_s = Machine.measure().floor_s(*cost.prefill(PREFILL_TOKENS))
        row = rows.setdefault(f"prefill of {PREFILL_TOKENS}", [])
        row.append((engine.prefill_s(PREFILL_TOKENS), floor_s, floor_s, 0.0))
    machine = Machine.measure()
    print(
        f"{arguments.threads} threads, {machine.bytes_per_s / 1e9:.1f} GB/s, "
        f"{machine.operations_per_s / 1e9:.0f} GFLOP/s; medians of {arguments.rounds} rounds\n"
    )
    print(
        "| | measured ms | floor ms | ratio | of weights alone | ratio | not the model ms | share |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        step_s, floor_s, weights_s, other_s = map(statistics.median, zip(*row, strict=True))
        ratio = statistics.median(entry[0] / entry[1] for entry in row)
        to_weights = statistics.median(entry[0] / entry[2] for entry in row)
        share = statistics.median(entry[3] / entry[0] for entry in row)
        print(
            f"| {name} | {step_s * 1e3:.1f} | {floor_s * 1e3:.1f} | {ratio:.2f}x "
            f"| {weights_s * 1e3:.1f} | {to_weights:.2f}x | {other_s * 1e3:.2f} | {share:.1%} |"
        )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
