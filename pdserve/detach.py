"""The supervisor in a session of its own, and its end from another terminal."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from rich.console import Console

from pdserve.client import connect
from pdserve.display import StartProgress, command_line, print_banner, start_progress
from pdserve.errors import StartFailed
from pdserve.leftovers import remove_leftovers
from pdserve.processes import is_alive
from pdserve.readiness import Interrupted, Wait, wait_for_workers
from pdserve.state import ServiceState, StateFolder

_START_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 20.0
_KILL_TIMEOUT_S = 5.0
_POLL_S = 0.1
_NUM_LOG_LINES = 15


def start_detached(arguments: Sequence[str], folder: StateFolder, console: Console) -> None:
    """Run `pdserve up` with `arguments` in the background; return once it is ready.

    Raises: ServiceExists. StartFailed: with the end of its log. Interrupted: it was stopped again.
    """
    folder.check_free()
    folder.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    started_s = time.monotonic()
    # NOTE: not emptied here: of two that start at once only the one with the lock may do that.
    with folder.log_path.open("a") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "pdserve", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    stopping = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: stopping.set())
    try:
        with start_progress(console) as progress:
            state = _follow(process, folder, log_start, stopping, progress)
    except Interrupted:
        process.terminate()
        process.wait(_STOP_TIMEOUT_S)
        raise
    finally:
        signal.signal(signal.SIGINT, previous)
    with connect(state.controller_address, state.token) as client:
        status = client.status()
    numbers = (status.desired_prefillers, status.desired_decoders)
    print_banner(console, state, numbers, time.monotonic() - started_s)
    stop = command_line("down", state.service, state.root)
    console.print(f"It runs in the background; stop it with: {stop}", highlight=False)


def stop_running(folder: StateFolder, console: Console) -> None:
    """Ask the supervisor to stop and wait until it has; kill it if it does not.

    Raises: ServiceNotRunning.
    """
    state = folder.read_running()
    os.kill(state.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + _STOP_TIMEOUT_S
    while folder.is_locked() or is_alive(state.pid):
        if time.monotonic() >= deadline_s:
            _kill(state.pid, folder)
            console.print(f"it did not stop within {_STOP_TIMEOUT_S:.0f} s: killed")
            return
        time.sleep(_POLL_S)
    console.print(f"service `{folder.service}` has stopped", highlight=False)


def _kill(pid: int, folder: StateFolder) -> None:
    """End a supervisor that hangs, and what it cannot end any more."""
    os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while is_alive(pid) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    remove_leftovers(folder.path)


def _follow(
    process: "subprocess.Popen[bytes]",
    folder: StateFolder,
    log_start: int,
    stopping: threading.Event,
    progress: StartProgress,
) -> ServiceState:
    """Show how the start goes on, until it is over; log_start: bytes that the log had before."""

    def check() -> None:
        if process.poll() is not None:
            log = folder.log_path.read_bytes()
            # A log that is shorter than it was has been emptied since.
            fresh = log[log_start:] if len(log) >= log_start else log
            lines = fresh.decode(errors="replace").splitlines()
            tail = "\n".join(lines[-_NUM_LOG_LINES:])
            raise StartFailed(f"it ended with status {process.returncode}; its log ends:\n{tail}")

    wait = Wait(stopping, time.monotonic() + _START_TIMEOUT_S, check)
    progress.show("Ray", "starting", None)
    while (state := folder.read()) is None or state.pid != process.pid:
        wait.pause("the supervisor")
    with connect(state.controller_address, state.token) as client:
        try:
            wait_for_workers(client, wait, progress)
        except StartFailed:
            # The supervisor sees the same and ends; its own words are better.
            process.wait(_STOP_TIMEOUT_S)
            check()
            raise
    while (state := folder.read()) is None or state.status != "ready":
        wait.pause("the proxy")
    progress.show("proxy", "ready", 1.0)
    return state
