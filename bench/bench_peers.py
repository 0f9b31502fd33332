"""Our service beside other servers of the same model: same cores, same client, one at a time.

Peers are started from environments of their own, see services.py:
    python bench/export_model.py build/model
    python bench/bench_peers.py --vllm ENV --vllm-model build/model --llama ENV --gguf m.gguf
Without --vllm and --llama it shows the forms of our own alone. --only and --load take a regular
expression that is found in a name.
"""

import argparse
import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

from services import Service, Target, add_peer_options, chosen_services, llama_cpp, print_lacks

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


def measure(target: Target, load: LoadConfig) -> Values:
    """Run one load on a server."""
    load = replace(load, url=target.url, model=target.model, prompt_kind=target.prompt_kind)
    result = asyncio.run(run_load(load))
    return summarize(load, result, slo_ttft_s=SLO_TTFT_S, slo_tpot_s=SLO_TPOT_S)


def measure_service(service: Service, only_load: str) -> dict[str, Values]:
    """Start it, put on it every load that it can serve, print a row for each."""
    summaries = {}
    with service.running() as target:
        for name, load in LOADS.items():
            concurrency = load.concurrency or load.num_requests
            if not re.search(only_load, name) or concurrency > service.max_concurrency:
                continue
            summary = summaries[name] = measure(target, load)
            print(
                f"| {name} | {service.name} | {summary['ttft_s']['p50'] * 1e3:.0f} "
                f"| {summary['tpot_s']['p50'] * 1e3:.1f} | {summary['itl_s']['p99'] * 1e3:.0f} "
                f"| {summary['output_tokens_per_s']:.1f} | {summary['goodput_share']:.0%} "
                f"| {summary['num_errors']} |",
                flush=True,
            )
    return summaries


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
    print_lacks(services)
    print("| load | service | TTFT p50 ms | TPOT p50 ms | ITL p99 ms | tok/s | goodput | errors |")
    print("|---|---|---|---|---|---|---|---|")
    results = {service.name: measure_service(service, arguments.load) for service in services}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
