"""Our own processes, by id and start time: an id alone may belong to somebody else by now."""

import json
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process that ran at some time."""

    pid: int
    start_ticks: int
    """When it started, in the kernel's clock ticks since boot."""

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return _read(self.pid)[:1] == (self,)

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


def write_note(path: Path, processes: Iterable[ProcessId]) -> None:
    """Note processes for whoever has to clean up after us."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps([[process.pid, process.start_ticks] for process in processes]))
    fresh.replace(path)


def kill_noted(path: Path) -> None:
    """End what of a note still runs, and forget the note."""
    if not path.is_file():
        return
    with suppress(ValueError):  # half written: its writer was killed
        for pid, start_ticks in json.loads(path.read_text()):
            ProcessId(pid, start_ticks).kill()
    path.unlink()


def _read(pid: int) -> tuple[ProcessId, int] | tuple[()]:
    """The process and its parent's id; nothing if there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return () if fields[0] in "ZX" else (ProcessId(pid, int(fields[19])), int(fields[1]))
