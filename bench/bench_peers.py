"""Our service beside other servers of the same model: same cores, same client, one at a time.

Peers are started from environments of their own, see services.py:
    python bench/export_model.py build/model
    python bench/bench_peers.py --vllm ENV --vllm-model build/model --llama ENV --gguf m.gguf
Without --vllm and --llama it shows the forms of our own alone. --only and --load take a regular
expression that is found in a name. Starting a service is slow, so --rounds repeats the loads in one
that runs, each time with prompts that it has not seen; shown are medians over the repeats, and in
the end their ratios to one service.
"""

import argparse
import asyncio
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ratios import print_ratios
from services import (
    Service,
    Target,
    add_peer_options,
    chosen_services,
    llama_cpp,
    print_lacks,
    reference_name,
)

from pdserve.load import LoadConfig, run_load
from pdserve.load_report import Values, summarize

SLO_TTFT_S, SLO_TPOT_S = 2.0, 0.2
LOADS = {
    "batch 1": LoadConfig(
        url="", model="", concurrency=1, num_requests=3, input_tokens=64, output_tokens=64
    ),
    "batch 8": LoadConfig(
        url="", model="", concurrency=8, num_requests=16, input_tokens=64, output_tokens=64
    ),
    "batch 32": LoadConfig(
        url="", model="", concurrency=32, num_requests=64, input_tokens=64, output_tokens=64
    ),
    "1,024-token prompt": LoadConfig(
        url="", model="", concurrency=1, num_requests=3, input_tokens=1024, output_tokens=8
    ),
    "900 of 1,000 shared": LoadConfig(
        url="",
        model="",
        concurrency=8,
        num_requests=24,
        input_tokens=1000,
        output_tokens=32,
        shared_prefix_tokens=900,
    ),
    "Poisson 0.5/s, 512 in, 64 out": LoadConfig(
        url="", model="", rate=0.5, num_requests=30, input_tokens=512, output_tokens=64
    ),
}


SIDE_BY_SIDE = {  # title -> keys of a summary, and how many of the shown unit one of it is
    "Output tokens/s": (("output_tokens_per_s",), 1.0),
    "TPOT p50 in ms": (("tpot_s", "p50"), 1e3),
    "TTFT p50 in ms": (("ttft_s", "p50"), 1e3),
}
Repeats = Sequence[Values]
"""Of one load on one service."""


def measure(target: Target, load: LoadConfig, seed: int) -> Values:
    """Run one load on a server. seed: of its prompts and arrivals."""
    load = replace(
        load, url=target.url, model=target.model, prompt_kind=target.prompt_kind, seed=seed
    )
    result = asyncio.run(run_load(load))
    return summarize(load, result, slo_ttft_s=SLO_TTFT_S, slo_tpot_s=SLO_TPOT_S)


def median(repeats: Repeats, *keys: str) -> float:
    """Of a figure of a summary over the repeats in which there is one; NaN of none."""
    values = []
    for found in repeats:
        value = found[keys[0]] if len(keys) == 1 else found[keys[0]][keys[1]]
        if value is not None:
            values.append(float(value))
    return statistics.median(values) if values else math.nan


def measure_service(service: Service, only_load: str, rounds: int) -> dict[str, list[Values]]:
    """Start it, put on it every load that it can serve, print a row for each.

    NOTE: no two share a seed, else the prompts of one are in the prefix cache for the next.
    """
    repeats: dict[str, list[Values]] = {}
    with service.running() as target:
        for number in range(rounds):
            for index, (name, load) in enumerate(LOADS.items()):
                concurrency = load.concurrency or load.num_requests
                if re.search(only_load, name) and concurrency <= service.max_concurrency:
                    summary = measure(target, load, seed=number * len(LOADS) + index)
                    repeats.setdefault(name, []).append(summary)
    for name, found in repeats.items():
        print(
            f"| {name} | {service.name} | {median(found, 'ttft_s', 'p50') * 1e3:.0f} "
            f"| {median(found, 'tpot_s', 'p50') * 1e3:.1f} "
            f"| {median(found, 'itl_s', 'p99') * 1e3:.0f} "
            f"| {median(found, 'output_tokens_per_s'):.1f} "
            f"| {median(found, 'goodput_share'):.0%} "
            f"| {sum(summary['num_errors'] for summary in found)} |",
            flush=True,
        )
    return repeats


def figures(
    results: Mapping[str, Mapping[str, Repeats]], keys: Sequence[str], scale: float
) -> dict[str, dict[str, float]]:
    """Medians of one figure by service and load, where there are any."""
    return {
        service: {
            load: scale * value
            for load, repeats in loads.items()
            if (value := median(repeats, *keys)) > 0
        }
        for service, loads in results.items()
    }


def main() -> None:
    """Measure every service and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    add_peer_options(parser)
    parser.add_argument("--llama", type=Path, help="environment with llama-cpp-python")
    parser.add_argument("--gguf", type=Path, action="append", default=[], help="for --llama")
    parser.add_argument("--load", default="", help="regular expression: of a load's name")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/bench_peers.json"))
    arguments = parser.parse_args()
    services = chosen_services(arguments, ["--model", arguments.model])
    if arguments.llama and re.search(arguments.only, "llama.cpp"):
        services += [llama_cpp(arguments.llama, gguf) for gguf in arguments.gguf]
    reference = reference_name(arguments.reference, services)
    print_lacks(services)
    print("| load | service | TTFT p50 ms | TPOT p50 ms | ITL p99 ms | tok/s | goodput | errors |")
    print("|---|---|---|---|---|---|---|---|")
    results = {
        service.name: measure_service(service, arguments.load, arguments.rounds)
        for service in services
    }
    for title, (keys, scale) in SIDE_BY_SIDE.items():
        print_ratios(title, figures(results, keys, scale), reference)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
