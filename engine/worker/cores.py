"""The workers of one host lend each other the cores they do not use.

Each worker owns a share of the cores and a file for it. Its first number is 1 while the worker
computes. Other workers' kernels look at it before every piece of work, so a lender has its cores
back within milliseconds, and a borrower need not wait for its next step to take them. A lock on
the file, gone with its process, tells a busy worker from one that died busy.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

_RESCAN_S = 1.0
_SIZE = 4


@dataclass(slots=True)
class _Share:
    """Another worker's file."""

    fd: int
    inode: int
    num_threads: int
    busy: ctypes.c_int32
    """Shared memory."""


class CoreShares:
    """One worker's view; used by its engine loop thread only."""

    def __init__(self, folder: Path, name: str, own_threads: int, max_threads: int) -> None:
        """Join the workers that share `folder`; `max_threads` bounds what a step may use.

        Raises: OSError: the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_lent = max(0, max_threads - own_threads)
        # The number of threads is part of the name: a file is complete once it has its size.
        self._own_path = folder / f"{name}.{own_threads}"
        self._own_fd = os.open(self._own_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # NOTE: written, not truncated to its size: touching a page that a full disk cannot hold
        # would end the process.
        os.pwrite(self._own_fd, bytes(_SIZE), 0)
        # NOTE: never unmapped, kernels may be looking at them: a page per worker that ever was.
        self._maps: list[mmap.mmap] = []
        self._own_busy = self._map(self._own_fd)
        self._own_busy.value = 0
        self._others: dict[str, _Share] = {}
        self._next_scan_s = 0.0
        self._is_busy = False

    def set_busy(self, is_busy: bool) -> None:
        """Say whether this worker has work; cheap when nothing changes."""
        if is_busy == self._is_busy:
            return
        self._is_busy = is_busy
        if not is_busy:
            self._own_busy.value = 0
            fcntl.flock(self._own_fd, fcntl.LOCK_UN)
            return
        self._own_busy.value = 1
        try:
            fcntl.flock(self._own_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another worker is looking at the lock right now; the next step tries again.
            self._is_busy = False
        # NOTE: again, as a worker that held the lock took this one for dead.
        self._own_busy.value = 1

    def lent_flags(self) -> list[int]:
        """Addresses of int32s, one per thread that others may lend: lent while it is 0."""
        self._scan(time.monotonic())
        flags = [
            ctypes.addressof(share.busy)
            for _, share in sorted(self._others.items())
            for _ in range(share.num_threads)
        ]
        return flags[: self._max_lent]

    def close(self) -> None:
        """Leave; the share is nobody's then."""
        for share in self._others.values():
            os.close(share.fd)
        self._others.clear()
        if self._own_fd >= 0:
            self._own_busy.value = 0
            self._own_path.unlink(missing_ok=True)
            os.close(self._own_fd)
            self._own_fd = -1
            with contextlib.suppress(OSError):  # somebody else is still in
                self._folder.rmdir()

    def _map(self, fd: int) -> ctypes.c_int32:
        self._maps.append(mmap.mmap(fd, _SIZE))
        return ctypes.c_int32.from_buffer(self._maps[-1])

    def _scan(self, now_s: float) -> None:
        if now_s < self._next_scan_s:
            return
        self._next_scan_s = now_s + _RESCAN_S
        found = {
            entry.name: entry.inode()
            for entry in self._entries()
            if entry.name != self._own_path.name
        }
        for name, share in list(self._others.items()):
            if found.get(name) != share.inode:
                os.close(self._others.pop(name).fd)
            elif share.busy.value:
                _free_if_dead(share)
        for name in found.keys() - self._others.keys():
            with contextlib.suppress(FileNotFoundError):
                self._open(name)

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._folder) as entries:
                return list(entries)
        except FileNotFoundError:  # somebody removed the folder: nobody lends any more
            return []

    def _open(self, name: str) -> None:
        fd = os.open(self._folder / name, os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(fd)
        if status.st_size < _SIZE:  # its worker is just making it
            os.close(fd)
            return
        num_threads = int(name.rpartition(".")[2])
        self._others[name] = _Share(fd, status.st_ino, num_threads, self._map(fd))


def _free_if_dead(share: _Share) -> None:
    """Reset the flag of a worker that cannot do so any more."""
    try:
        fcntl.flock(share.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    share.busy.value = 0
    fcntl.flock(share.fd, fcntl.LOCK_UN)
