"""Start a service, put the standard loads on it, print a table and write JSON: `make bench`.

Other options are those of `pdserve up`, such as --set transport=mooncake; with make: ARGS="...".
"""

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path

from services import pdserve_state

from pdserve.load import LoadConfig, run_load
from pdserve.load_report import Values, summarize
from pdserve.state import ServiceState

SLO_TTFT_S, SLO_TPOT_S = 2.0, 0.2

# name -> load: those of docs/performance.md
LOADS = {
    "batch 1": LoadConfig(
        url="", model="", concurrency=1, num_requests=6, input_tokens=64, output_tokens=64
    ),
    "batch 8": LoadConfig(
        url="", model="", concurrency=8, num_requests=24, input_tokens=64, output_tokens=64
    ),
    "batch 32": LoadConfig(
        url="", model="", concurrency=32, num_requests=64, input_tokens=64, output_tokens=64
    ),
    "1,024-token prompts": LoadConfig(
        url="", model="", concurrency=1, num_requests=6, input_tokens=1024, output_tokens=8
    ),
    "Poisson 0.5/s, 512 in, 64 out": LoadConfig(
        url="", model="", rate=0.5, num_requests=30, input_tokens=512, output_tokens=64
    ),
    "8 x 1,000 tokens, 900 shared": LoadConfig(
        url="",
        model="",
        concurrency=8,
        num_requests=32,
        input_tokens=1000,
        output_tokens=32,
        shared_prefix_tokens=900,
    ),
}


def measure(state: ServiceState, name: str) -> Values:
    """Run one load.

    NOTE: no two share a seed, else the prompts of one are in the prefix cache for the next.
    """
    seed = list(LOADS).index(name)
    load = replace(LOADS[name], url=state.http_url, model=state.model, seed=seed)
    result = asyncio.run(run_load(load))
    return summarize(load, result, slo_ttft_s=SLO_TTFT_S, slo_tpot_s=SLO_TPOT_S)


def row(name: str, summary: Values) -> str:
    """One line of the Markdown table."""
    ttft, tpot, itl = summary["ttft_s"], summary["tpot_s"], summary["itl_s"]
    return (
        f"| {name} | {ttft['p50'] * 1e3:.0f} | {ttft['p99'] * 1e3:.0f} | {tpot['p50'] * 1e3:.1f} "
        f"| {itl['p99'] * 1e3:.0f} | {summary['output_tokens_per_s']:.1f} "
        f"| {summary['goodput_share']:.0%} | {summary['num_errors']} |"
    )


def main() -> None:
    """Start, measure, stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="part of a load's name")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/bench_service.json"))
    arguments, up_options = parser.parse_known_args()
    summaries: dict[str, Values] = {}
    with pdserve_state(up_options) as state:
        print("| load | TTFT p50 | p99 | TPOT p50 | ITL p99 | tok/s | goodput | errors |")
        print("|---|---|---|---|---|---|---|---|")
        for name in LOADS:
            if (arguments.only or "") in name:
                summaries[name] = measure(state, name)
                print(row(name, summaries[name]), flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(summaries, indent=2) + "\n")
    print(f"times in ms; goodput: TTFT {SLO_TTFT_S} s and TPOT {SLO_TPOT_S} s; {arguments.output}")


if __name__ == "__main__":
    main()
