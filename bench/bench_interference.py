"""What arriving prompts do to running streams: disaggregated against colocated, in one run.

Four streams decode, once alone and once while a 1,024-token prompt arrives every 6 s. Printed per
service: their inter-token latency and token rate without and with these arrivals. Both times they
emit as many tokens, for a step takes longer the longer their contexts are. "colocated" is the
same engine as one worker that owns every core (prefiller.replicas=0). --rounds repeats it all in a
service that runs, with other prompts; shown are medians, and in the end their ratios to one
service.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ratios import print_ratios
from services import Service, add_peer_options, chosen_services, print_lacks, reference_name

from pdserve.load import LoadConfig, LoadResult, run_load

NUM_STREAMS = 4
PROMPT_INTERVAL_S = 6.0
NUM_PROMPTS = 5
PILOT_TOKENS = 64
SEEDS = 1000
"""Of one round; the next one has others, so that no prompt comes twice."""
SIDE_BY_SIDE = {  # name -> where it is, and how many of the shown unit one of it is
    "ITL p50 quiet, ms": ("quiet", "itl_p50_s", 1e3),
    "ITL p99 quiet, ms": ("quiet", "itl_p99_s", 1e3),
    "ITL p50 disturbed, ms": ("disturbed", "itl_p50_s", 1e3),
    "ITL p99 disturbed, ms": ("disturbed", "itl_p99_s", 1e3),
    "tokens/s quiet": ("quiet", "tokens_per_s", 1.0),
    "tokens/s disturbed": ("disturbed", "tokens_per_s", 1.0),
    "TTFT p50 of prompts, ms": ("prompts", "ttft_p50_s", 1e3),
    "TTFT max of prompts, ms": ("prompts", "ttft_max_s", 1e3),
}

Row = dict[str, float]


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def row(result: LoadResult, until_s: float) -> Row:
    """Streams' figures, over the time in which all of them ran."""
    itl = [
        gap
        for request in result.requests
        for gap, at in zip(request.itl_s, request.piece_s[1:], strict=True)
        if at <= until_s
    ]
    return {
        "itl_p50_s": statistics.median(itl),
        "itl_p99_s": quantile(itl, 0.99),
        "tokens_per_s": NUM_STREAMS / statistics.mean(itl),
    }


async def measure(url: str, model: str, seed: int) -> dict[str, Row]:
    """Quiet, then disturbed. seed: the first of this round's."""
    streams = LoadConfig(
        url=url,
        model=model,
        concurrency=NUM_STREAMS,
        num_requests=NUM_STREAMS,
        input_tokens=64,
        output_tokens=PILOT_TOKENS,
    )
    pilot = row(await run_load(replace(streams, seed=seed + 3)), float("inf"))
    needed = int(pilot["tokens_per_s"] / NUM_STREAMS * PROMPT_INTERVAL_S * NUM_PROMPTS)
    streams = replace(streams, output_tokens=needed, warmup_requests=0)
    quiet = await run_load(replace(streams, seed=seed + 1))
    prompts = LoadConfig(
        url=url, model=model, concurrency=1, num_requests=1, input_tokens=1024, output_tokens=8
    )
    ttfts: list[float] = []

    async def arrive(index: int) -> None:
        await asyncio.sleep(index * PROMPT_INTERVAL_S)
        load = replace(prompts, seed=seed + 100 + index, warmup_requests=0)
        ttfts.extend(request.ttft_s for request in (await run_load(load)).requests)

    task = asyncio.create_task(run_load(replace(streams, seed=seed + 2)))
    await asyncio.sleep(1.0)  # the streams are decoding now
    await asyncio.gather(*(arrive(index) for index in range(NUM_PROMPTS)))
    disturbed = await task
    errors = [r.error for r in (*quiet.requests, *disturbed.requests) if r.error]
    if errors:
        raise SystemExit(f"{len(errors)} streams failed: {errors[0]}")
    return {
        "quiet": row(quiet, float("inf")),
        "disturbed": row(disturbed, min(r.piece_s[-1] for r in disturbed.requests)),
        "prompts": {"ttft_p50_s": statistics.median(ttfts), "ttft_max_s": max(ttfts)},
    }


def measure_service(service: Service, rounds: int) -> list[dict[str, Row]]:
    """Start it, measure it, stop it."""
    with service.running() as target:
        return [
            asyncio.run(measure(target.url, target.model, SEEDS * number))
            for number in range(rounds)
        ]


def medians(repeats: Sequence[dict[str, Row]]) -> Row:
    """Of the figures that are shown, by their names."""
    return {
        name: scale * statistics.median(found[part][key] for found in repeats)
        for name, (part, key, scale) in SIDE_BY_SIDE.items()
    }


def main() -> None:
    """Measure every service and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/interference.json"))
    add_peer_options(parser)
    arguments = parser.parse_args()
    services = chosen_services(arguments)
    reference = reference_name(arguments.reference, services)
    print_lacks(services)
    print("| service | ITL p50 quiet | p99 | p99 disturbed | ratio | rate kept | TTFT p50 |")
    print("|---|---|---|---|---|---|---|")
    results, shown = {}, {}
    for service in services:
        results[service.name] = measure_service(service, arguments.rounds)
        found = shown[service.name] = medians(results[service.name])
        quiet_ms, disturbed_ms = found["ITL p99 quiet, ms"], found["ITL p99 disturbed, ms"]
        print(
            f"| {service.name} | {found['ITL p50 quiet, ms']:.0f} | {quiet_ms:.0f} "
            f"| {disturbed_ms:.0f} | {disturbed_ms / quiet_ms:.1f}x "
            f"| {found['tokens/s disturbed'] / found['tokens/s quiet']:.0%} "
            f"| {found['TTFT p50 of prompts, ms']:.0f} |",
            flush=True,
        )
    print_ratios("Each figure", shown, reference)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
