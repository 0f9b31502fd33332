"""Run a command with a time limit; afterwards end every process that it left behind, by id."""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
KILL_AFTER_S = 10.0
POLL_S = 0.05


def descendants(root: int) -> Iterator[int]:
    """Ids of all processes below `root`, parents first; orphans are ours, since we adopt them."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    todo = list(children.get(root, ()))
    while todo:
        pid = todo.pop(0)
        yield pid
        todo += children.get(pid, ())


def end_all(number: signal.Signals) -> int:
    """Send a signal to everything below us; how many there were."""
    pids = list(descendants(os.getpid()))
    for pid in pids:
        try:
            name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            os.kill(pid, number)
            print(f"left behind: {pid} {name[:120]}", file=sys.stderr)
        except OSError:
            continue  # ended meanwhile
    return len(pids)


def wait(pid: int, timeout_s: float) -> int:
    """The status of child `pid`; meanwhile orphans that end are reaped, as init would do it.

    Raises: TimeoutError: it is not over by then.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if ended == 0:
            time.sleep(POLL_S)
    raise TimeoutError


def main() -> int:
    """Run the command; its status, 124 when the time was over, 130 when told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, required=True, metavar="SECONDS")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Being told to stop is no reason to leave processes behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    process = subprocess.Popen(arguments.command)
    try:
        status = wait(process.pid, arguments.timeout)
    except TimeoutError:
        print(f"not over after {arguments.timeout:.0f} s", file=sys.stderr)
        status = 124
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    deadline_s = time.monotonic() + KILL_AFTER_S
    while end_all(signal.SIGTERM) and time.monotonic() < deadline_s:
        time.sleep(1.0)
    end_all(signal.SIGKILL)
    return status


if __name__ == "__main__":
    sys.exit(main())
