"""Time to the first token of a long shared prefix after the whole service was restarted: computed
again, and fetched from the disk tier or from a Mooncake Store, in one run.
"""

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx

from pdserve.state import StateFolder

START_TIMEOUT_S = 300.0
PREFIX_TOKENS = 4096
TAIL_TOKENS = 32
WRITE_WAIT_S = 60.0
LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 30, 16 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
"""


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


def with_service(
    folder: str, tier: Sequence[str], prompts: list[list[int]], is_kept: Callable[[], bool]
) -> list[float]:
    """Start, send the prompts one by one, wait until the tier has what they computed, stop.

    Returns seconds to the first token and cached tokens, alternating.
    """
    place = ["--state-dir", folder]
    pdserve = [sys.executable, "-m", "pdserve"]
    options = ["http_port=0", "grpc_port=0", "service=bench", *tier]
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
        while not is_kept():
            if time.monotonic() > deadline_s:
                raise SystemExit("the tier lacks blocks after a minute")
            time.sleep(0.2)
        return figures
    finally:
        subprocess.run(
            [*pdserve, "down", "--service", "bench", *place],
            check=True,
            stdout=subprocess.DEVNULL,
        )


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def on_disk() -> Iterator[tuple[list[str], Callable[[], int]]]:
    """(options of the service, how many blocks there are)."""
    with tempfile.TemporaryDirectory() as folder:
        yield (
            [f"tiers.disk_path={folder}"],
            lambda: len(list(Path(folder).glob("*/*/[0-9a-f]*"))),
        )


@contextmanager
def in_store() -> Iterator[tuple[list[str], Callable[[], int]]]:
    """The same with a Mooncake Store: a master, and a process that lends it memory."""
    port, metrics_port = free_port(), free_port()
    address = f"127.0.0.1:{port}"
    master = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("mooncake_master")),
            *("--rpc_address=127.0.0.1", f"--rpc_port={port}", f"--metrics_port={metrics_port}"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    lender = None
    try:
        deadline_s = time.monotonic() + WRITE_WAIT_S
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if time.monotonic() > deadline_s:
                raise SystemExit("mooncake_master does not listen")
            time.sleep(0.1)
        lender = subprocess.Popen(
            [sys.executable, "-c", LENDER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert lender.stdout is not None
        lender.stdout.readline()

        def count() -> int:
            text = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10).text
            found = re.search(r"^master_key_count (\d+)", text, re.MULTILINE)
            return int(found[1]) if found else 0

        yield [f"tiers.store_address={address}"], count
    finally:
        for process in (lender, master):
            if process is not None:
                process.terminate()
                process.wait(10)


def measure(
    place: Callable[[], AbstractContextManager[tuple[list[str], Callable[[], int]]]],
    num_tokens: int,
) -> tuple[float, float, int]:
    """(s computed, s fetched after a restart of everything, cached tokens) of a prefix."""

    def tokens(count: int) -> list[int]:
        return [random.randrange(100, 20_000) for _ in range(count)]

    prefix, warm = tokens(num_tokens), tokens(64)
    with tempfile.TemporaryDirectory() as folder, place() as (options, count):
        first = [warm, prefix + tokens(TAIL_TOKENS)]
        _, _, computed_s, _ = with_service(
            folder, options, first, lambda: count() >= num_tokens // 32
        )
        again = [tokens(64), prefix + tokens(TAIL_TOKENS)]
        _, _, fetched_s, cached = with_service(folder, options, again, lambda: True)
    return computed_s, fetched_s, int(cached)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", type=int, default=PREFIX_TOKENS)
    parser.add_argument("--only", choices=["disk", "store"])
    parser.add_argument("-o", "--output", type=Path, default=Path("build/bench_tiers.json"))
    arguments = parser.parse_args()
    figures = {}
    for name, place in (("disk", on_disk), ("store", in_store)):
        if arguments.only not in (None, name):
            continue
        computed_s, fetched_s, cached = figures[name] = measure(place, arguments.prefix)
        print(
            f"{name}: prefix of {arguments.prefix} tokens: computed {computed_s:.2f} s, after a "
            f"restart {fetched_s:.2f} s with {cached} cached tokens: "
            f"{computed_s / fetched_s:.1f}x faster",
            flush=True,
        )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
