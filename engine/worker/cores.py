"""The workers of one host lend each other the cores they do not use.

Each worker owns a share of the cores and holds a lock on its own file while it has work. Before a
step, a worker counts the shares whose lock nobody holds, and computes with those cores too. A lock
is gone with its process, however that ends, so a share is never lost.
"""

import contextlib
import fcntl
import os
import time
from pathlib import Path

_RESCAN_S = 1.0


class CoreShares:
    """One worker's view; used by its engine loop thread only."""

    def __init__(self, folder: Path, name: str, own_threads: int, max_threads: int) -> None:
        """Join the workers that share `folder`; `max_threads` bounds what a step may use.

        Raises: OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._own_threads = own_threads
        self._max_threads = max(own_threads, max_threads)
        # The number of threads is part of the name, so that the others need not read anything.
        self._own_path = folder / f"{name}.{own_threads}"
        self._own_fd = os.open(self._own_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._others: dict[str, tuple[int, int]] = {}
        self._next_scan_s = 0.0
        self._is_busy = False

    def set_busy(self, is_busy: bool) -> None:
        """Say whether this worker has work; cheap when nothing changes."""
        if is_busy == self._is_busy:
            return
        self._is_busy = is_busy
        if not is_busy:
            fcntl.flock(self._own_fd, fcntl.LOCK_UN)
            return
        try:
            fcntl.flock(self._own_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another worker is looking at the lock right now; the next step tries again.
            self._is_busy = False

    def num_threads(self) -> int:
        """Threads for the next step: the own share, and those of workers that are idle."""
        self._scan(time.monotonic())
        num_lent = sum(threads for fd, threads in self._others.values() if _is_free(fd))
        return min(self._max_threads, self._own_threads + num_lent)

    def close(self) -> None:
        """Leave; the share is nobody's then."""
        for fd, _ in self._others.values():
            os.close(fd)
        self._others.clear()
        if self._own_fd >= 0:
            self._own_path.unlink(missing_ok=True)
            os.close(self._own_fd)
            self._own_fd = -1
            with contextlib.suppress(OSError):  # somebody else is still in
                self._folder.rmdir()

    def _scan(self, now_s: float) -> None:
        if now_s < self._next_scan_s:
            return
        self._next_scan_s = now_s + _RESCAN_S
        names = {entry for entry in os.listdir(self._folder) if entry != self._own_path.name}
        for name in self._others.keys() - names:
            os.close(self._others.pop(name)[0])
        for name in names - self._others.keys():
            try:
                fd = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            self._others[name] = (fd, int(name.rpartition(".")[2]))


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(fd, fcntl.LOCK_UN)
    return True
