"""Time to the first token of a long shared prefix after the whole service was restarted: computed
again, and fetched from the disk tier, in one run.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from pdserve.state import StateFolder

START_TIMEOUT_S = 300.0
PREFIX_TOKENS = 4096
TAIL_TOKENS = 32
WRITE_WAIT_S = 60.0


def ttft(url: str, model: str, prompt: list[int]) -> tuple[float, int]:
    """(seconds to the first piece of a stream, cached tokens that the usage reports)."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_s, cached = 0.0, 0
    started_s = time.monotonic()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            first_s = first_s or time.monotonic() - started_s
            usage = json.loads(line[6:]).get("usage")
            if usage:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    return first_s, cached


def with_service(folder: str, tier: str, prompts: list[list[int]], num_files: int) -> list[float]:
    """Start, send the prompts one by one, wait for so many files of the tier, stop.

    Returns seconds to the first token and cached tokens, alternating.
    """
    place = ["--state-dir", folder]
    pdserve = [sys.executable, "-m", "pdserve"]
    options = ["http_port=0", "grpc_port=0", "service=bench", f"tiers.disk_path={tier}"]
    sets = [part for option in options for part in ("--set", option)]
    subprocess.run(
        [*pdserve, "up", "--detach", *sets, *place],
        check=True,
        timeout=START_TIMEOUT_S,
        stdout=subprocess.DEVNULL,
    )
    try:
        state = StateFolder(Path(folder), "bench").read_running()
        figures = [figure for p in prompts for figure in ttft(state.http_url, state.model, p)]
        deadline_s = time.monotonic() + WRITE_WAIT_S
        while len(list(Path(tier).glob("*/*/[0-9a-f]*"))) < num_files:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the tier has fewer than {num_files} blocks after a minute")
            time.sleep(0.2)
        return figures
    finally:
        subprocess.run(
            [*pdserve, "down", "--service", "bench", *place],
            check=True,
            stdout=subprocess.DEVNULL,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", type=int, default=PREFIX_TOKENS)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/bench_tiers.json"))
    arguments = parser.parse_args()

    def tokens(count: int) -> list[int]:
        return [random.randrange(100, 20_000) for _ in range(count)]

    prefix, warm = tokens(arguments.prefix), tokens(64)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as tier:
        first = [warm, prefix + tokens(TAIL_TOKENS)]
        _, _, computed_s, _ = with_service(folder, tier, first, arguments.prefix // 32)
        again = [tokens(64), prefix + tokens(TAIL_TOKENS)]
        _, _, fetched_s, cached = with_service(folder, tier, again, 0)
    print(
        f"prefix of {arguments.prefix} tokens: computed {computed_s:.2f} s, after a restart "
        f"{fetched_s:.2f} s with {cached:.0f} cached tokens: {computed_s / fetched_s:.1f}x faster"
    )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    figures = {"computed_s": computed_s, "fetched_s": fetched_s, "cached_tokens": cached}
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
