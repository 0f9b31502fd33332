"""What the service takes: time to be ready, memory, and work while idle.

Memory is the proportional set size (PSS): a page that N processes share counts 1/N in each. It is
shown after a few requests, and when the KV caches of both roles have been written from one end to
the other, as hours of traffic would. Idle work is CPU time over 20 s, in percent of one core, after
the service has answered a few requests: every thread's time on a core (`schedstat`), in
nanoseconds. The kernel's ticks of 10 ms, which other tools count, are longer than all that most of
these threads do in that time. Ray's own processes are shown apart.
"""

import argparse
import asyncio
import json
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import psutil
from services import pdserve_state

from pdserve.load import LoadConfig, run_load
from pdserve.state import ServiceState

IDLE_S = 20.0
FULL = LoadConfig(
    url="", model="", concurrency=8, num_requests=16, input_tokens=1500, output_tokens=16
)
"""What no longer fits into the KV cache of either role."""
SETTLE_S = 5.0
COLUMNS = ("processes", "pss_mb", "full_pss_mb", "cpu_percent")
RAY_PROCESSES = ("raylet", "gcs_server")


def kind_of(process: psutil.Process, supervisor: int) -> str:
    """A name for the table; Ray's parts start with 'ray'."""
    command = " ".join(process.cmdline())
    if process.pid == supervisor:
        return "supervisor"
    if "-m proxy" in command:
        return "proxy"
    if "ray::ControllerActor" in command:
        return "controller"
    if "ray::" in command and "IDLE" not in command:
        return "worker"
    return "ray: " + (process.name() if process.name() in RAY_PROCESSES else "agents and spares")


def processes_of(state: ServiceState) -> dict[psutil.Process, str]:
    """Every process of the service and what it is."""
    supervisor = psutil.Process(state.pid)
    found = [supervisor, *supervisor.children(recursive=True)]
    return {process: kind_of(process, state.pid) for process in found}


def cpu_s(process: psutil.Process) -> float:
    """What the threads that it has now have been given so far."""
    threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def pss_mb(process: psutil.Process) -> float:
    """Its share of memory."""
    return float(process.memory_full_info().pss) / 1e6


def measure(state: ServiceState) -> dict[str, dict[str, float]]:
    """PSS, also with full KV caches, and idle CPU by kind."""
    load = LoadConfig(
        url=state.http_url,
        model=state.model,
        concurrency=4,
        num_requests=8,
        input_tokens=200,
        output_tokens=16,
    )
    asyncio.run(run_load(load))
    time.sleep(SETTLE_S)
    processes = processes_of(state)
    before = {process: cpu_s(process) for process in processes}
    started_s = time.monotonic()
    time.sleep(IDLE_S)
    elapsed_s = time.monotonic() - started_s
    used = {process: cpu_s(process) - before[process] for process in processes}
    few = {process: pss_mb(process) for process in processes}
    asyncio.run(run_load(replace(FULL, url=state.http_url, model=state.model)))
    rows: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(COLUMNS, 0.0))
    for process, kind in processes.items():
        row = rows[kind]
        row["processes"] += 1
        row["pss_mb"] += few[process]
        row["full_pss_mb"] += pss_mb(process)
        row["cpu_percent"] += 100 * used[process] / elapsed_s
    return dict(rows)


def main() -> None:
    """Start, measure, stop; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("build/bench_footprint.json"))
    arguments, up_options = parser.parse_known_args()
    started_s = time.monotonic()
    with pdserve_state(up_options) as state:
        ready_s = time.monotonic() - started_s
        rows = measure(state)
    print(f"ready after {ready_s:.1f} s\n")
    print(
        "| | processes | PSS MB | with full KV caches | idle CPU, % of a core |"
        "\n|---|---|---|---|---|"
    )
    ours = {kind: row for kind, row in rows.items() if not kind.startswith("ray")}
    groups = {**rows, "all but Ray's": _sum(ours), "all": _sum(rows)}
    for kind, row in groups.items():
        print(
            f"| {kind} | {row['processes']:.0f} | {row['pss_mb']:.0f} "
            f"| {row['full_pss_mb']:.0f} | {row['cpu_percent']:.1f} |"
        )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"ready_s": ready_s, **rows}, indent=2) + "\n")


def _sum(rows: dict[str, dict[str, float]]) -> dict[str, float]:
    return {key: sum(row[key] for row in rows.values()) for key in COLUMNS}


if __name__ == "__main__":
    main()
