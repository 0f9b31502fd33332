"""Our own processes, by id and start time: an id alone may belong to somebody else by now."""

import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process that ran at some time."""

    pid: int
    start_ticks: int
    """When it started, in the kernel's clock ticks since boot."""

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return _read(self.pid)[:1] == (self,)

    def name(self) -> str:
        """What the kernel calls it, at most 15 characters; empty if it is gone."""
        try:
            return Path(f"/proc/{self.pid}/comm").read_text().rstrip("\n")
        except (FileNotFoundError, ProcessLookupError):
            return ""

    def arguments(self) -> list[str]:
        """Its command line; empty if it is gone."""
        try:
            text = Path(f"/proc/{self.pid}/cmdline").read_bytes().decode(errors="replace")
            return text.split("\0")[:-1]
        except (FileNotFoundError, ProcessLookupError):
            return []

    def kill(self) -> None:
        """End it at once if it still runs."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Whether a process of this id runs."""
    return bool(_read(pid))


def descendants(root: int) -> list[ProcessId]:
    """Everything below `root`, children of children included."""
    children: dict[int, list[ProcessId]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if found := _read(int(path.name)):
            process, parent = found
            children.setdefault(parent, []).append(process)
    below: list[ProcessId] = []
    todo = [root]
    while todo:
        level = children.get(todo.pop(), [])
        below += level
        todo += [process.pid for process in level]
    return below


def ended_children() -> list[str]:
    """What the kernel calls those children of this process that have ended, until waited for."""
    names = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            start, _, end = path.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent = end.split()[:2]
        if state == "Z" and int(parent) == os.getpid():
            names.append(start.partition("(")[2])
    return names


def write_note(path: Path, processes: Iterable[ProcessId]) -> None:
    """Note processes for whoever has to clean up after us.

    What was noted before stays while it lives: when its parent dies, it is below nobody we know.
    """
    noted = {*processes, *(process for process in _read_note(path) if process.is_alive())}
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(sorted([process.pid, process.start_ticks] for process in noted)))
    fresh.replace(path)


def kill_noted(path: Path) -> None:
    """End what of a note still runs, wait until it is gone, and forget the note."""
    _kill_all(_read_note(path))
    path.unlink(missing_ok=True)


def kill_naming(folder: Path) -> None:
    """End processes whose command lines name files of a folder, and wait until they are gone."""
    running = [
        found[0] for path in Path("/proc").glob("[0-9]*") if (found := _read(int(path.name)))
    ]
    naming = [p for p in running if any(f"{folder}/" in part for part in p.arguments())]
    _kill_all([process for process in naming if process.pid != os.getpid()])


def _kill_all(processes: Sequence[ProcessId]) -> None:
    for process in processes:
        process.kill()
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline_s:
        time.sleep(0.02)


def _read_note(path: Path) -> list[ProcessId]:
    try:
        return [ProcessId(pid, ticks) for pid, ticks in json.loads(path.read_text())]
    except (FileNotFoundError, ValueError):  # half written: its writer was killed
        return []


def _read(pid: int) -> tuple[ProcessId, int] | tuple[()]:
    """The process and its parent's id; nothing if there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return () if fields[0] in "ZX" else (ProcessId(pid, int(fields[19])), int(fields[1]))
