"""What the command line shows: progress of a start, the ready banner, the status table."""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from pdserve.state import ServiceState, place_options
from pdserve.units import format_bytes
from protos import worker_pb2

STATES = {
    worker_pb2.WORKER_STARTING: "starting",
    worker_pb2.WORKER_READY: "ready",
    worker_pb2.WORKER_DRAINING: "draining",
    worker_pb2.WORKER_FAILED: "failed",
}


class StartProgress:
    """One bar for Ray, one for the proxy, one per worker."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, name: str, phase: str, fraction: float | None) -> None:
        """Update a bar; a fraction of None is a bar that only moves."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=None, phase=phase)
        self._progress.update(
            self._tasks[name],
            total=None if fraction is None else 1.0,
            completed=fraction or 0.0,
            phase=phase,
        )
        if fraction == 1.0:
            self._progress.stop_task(self._tasks[name])

    def show_worker(self, entry: worker_pb2.WorkerEntry) -> None:
        """Update the bar of a worker."""
        if entry.state == worker_pb2.WORKER_READY:
            self.show(entry.engine_id, entry.phase, 1.0)
        else:
            # A phase that has not counted anything yet only moves.
            self.show(entry.engine_id, entry.phase, min(entry.progress, 0.999) or None)


@contextmanager
def start_progress(console: Console) -> Iterator[StartProgress]:
    """Bars while a service starts."""
    columns = (
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[phase]:<24}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield StartProgress(progress)


@contextmanager
def load_progress(num_requests: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, if that is a terminal; what is yielded counts one request that ended."""
    console = Console(stderr=True)
    columns = (
        TextColumn("requests"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=num_requests)
        yield lambda: progress.advance(task)


def print_banner(
    console: Console, state: ServiceState, num_workers: tuple[int, int], seconds: float
) -> None:
    """Say where the service is and how to try it."""
    body = (
        f'{{"model": "{state.model}", "stream": true, "temperature": 0, '
        '"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
    )
    prefillers, decoders = num_workers
    lines = [
        "",
        f"pdserve is ready after {seconds:.1f} s: {state.model}, "
        f"{prefillers} prefiller(s), {decoders} decoder(s)",
        f"  HTTP  {state.http_url}/v1",
        f"  gRPC  {state.grpc_address}  pdserve.v1.Inference (with reflection)",
        "",
        "Try it:",
        f"  curl -N {state.http_url}/v1/chat/completions -H 'Content-Type: application/json' \\",
        *(['    -H "Authorization: Bearer $PDSERVE_API_KEY" \\'] if state.needs_key else []),
        f"    -d {shlex.quote(body)}",
        f"  {command_line('chat', state.service, state.root)} 'Why is the sky blue?'",
        "",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def command_line(command: str, service: str, root: str = "") -> str:
    """How to call `pdserve COMMAND` for this service from this shell and folder.

    root: where the service is noted; empty for the default.
    """
    program = "pdserve"
    if shutil.which(program) is None:
        program = os.path.relpath(Path(sys.executable).parent / program)
    return f"{program} {command}{place_options(service, root)}"


def status_table(
    state: ServiceState,
    status: worker_pb2.ServiceStatus,
    stats: Mapping[str, worker_pb2.WorkerStats],
) -> Table:
    """The workers, one a line."""
    title = (
        f"{state.service}: {state.model}, {state.status}, {state.http_url}, "
        f"prefillers {status.desired_prefillers}, decoders {status.desired_decoders}"
    )
    table = Table(title=title, title_justify="left")
    for column in ("worker", "state", "address", "pid", "restarts", "running", "waiting", "KV"):
        table.add_column(column)
    for entry in status.membership.workers:
        figures = stats.get(entry.engine_id)
        held = ""
        if figures:
            held = f"{figures.num_held_blocks}/{figures.num_blocks} {figures.kv_cache_dtype}"
        table.add_row(
            entry.engine_id,
            f"{STATES[entry.state]}: {entry.error or entry.phase}",
            entry.address,
            str(entry.pid or ""),
            str(entry.num_restarts),
            str(figures.num_running) if figures else "",
            str(figures.num_waiting) if figures else "",
            held,
        )
    return table


def transfer_lines(stats: Mapping[str, worker_pb2.WorkerStats]) -> list[str]:
    """What moved between the workers."""
    return [
        f"{name} -> {peer.peer_engine_id}: {peer.num_transfers} transfers over {peer.transport}, "
        f"{format_bytes(peer.num_bytes)}, {peer.num_failures} failed"
        for name, figures in stats.items()
        for peer in figures.transfers
        if figures.role == worker_pb2.ROLE_PREFILLER
    ]
