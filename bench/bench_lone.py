"""A lone request on one prefiller and one decoder, beside the same engine as one worker.

Both services run on the same cores, and rounds of requests take turns: one that nobody asks takes
no core. Per prompt length: medians of TTFT and of TPOT, and the ratio of both services in each.
"""

import argparse
import asyncio
import json
import statistics
from contextlib import ExitStack
from pathlib import Path

from services import COLOCATED, Target, pdserve

from pdserve.load import LoadConfig, RequestTimes, run_load

LENGTHS = (64, 1024)
OUTPUT_TOKENS = 32

Times = dict[str, dict[int, list[RequestTimes]]]
"""By service and prompt length."""


async def measure(targets: dict[str, Target], rounds: int, requests: int) -> Times:
    """A few requests to each service in turn, for every length, and again."""
    times: Times = {name: {length: [] for length in LENGTHS} for name in targets}
    for turn in range(rounds):
        for length in LENGTHS:
            for name, target in targets.items():
                load = LoadConfig(
                    url=target.url,
                    model=target.model,
                    concurrency=1,
                    num_requests=requests if length < max(LENGTHS) else max(2, requests // 4),
                    warmup_requests=1,
                    input_tokens=length,
                    output_tokens=OUTPUT_TOKENS,
                    seed=1000 * turn + length,
                )
                result = await run_load(load)
                errors = [request.error for request in result.requests if request.error]
                if errors:
                    raise SystemExit(f"{name}: {errors[0]}")
                times[name][length] += result.requests
    return times


def median_ms(requests: list[RequestTimes], name: str) -> float:
    """Of a time in seconds that every request has."""
    return 1e3 * statistics.median(getattr(request, name) for request in requests)


def main() -> None:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/bench_lone.json"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=12, help="a round, of short prompts")
    arguments, up_options = parser.parse_known_args()
    services = [
        pdserve("colocated", (*COLOCATED, *up_options)),
        pdserve("PD", tuple(up_options)),
    ]
    with ExitStack() as stack:
        targets = {s.name: stack.enter_context(s.running()) for s in services}
        times = asyncio.run(measure(targets, arguments.rounds, arguments.requests))
    print("| prompt tokens | | colocated, ms | PD, ms | ratio |\n|---|---|---|---|---|")
    figures: dict[str, dict[str, float]] = {}
    for length in LENGTHS:
        for name in ("ttft_s", "tpot_s"):
            colocated, pd = (median_ms(times[s.name][length], name) for s in services)
            label = name.removesuffix("_s").upper()
            print(f"| {length:,} | {label} | {colocated:.1f} | {pd:.1f} | {pd / colocated:.2f} |")
            figures[f"{label} {length}"] = {"colocated_ms": colocated, "pd_ms": pd}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
