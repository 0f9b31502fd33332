"""Blocks as files in a folder that all workers of a host share and that outlives them.

    <folder>/<namespace>/<first two digits of the hash>/<hash>      see frame.py

A file appears whole, by renaming, or not at all. Nobody has an index: a block is there if its file
is. Bounded by deleting the files that were used least recently, over all namespaces; workers that
write at the same time may exceed the bound by CHECK_BYTES each.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtransfer.tiers.base import TierCounters
from kvtransfer.tiers.frame import HEADER, is_intact, pack_header

CHECK_BYTES = 64 << 20
TEMPORARY_PREFIX = ".new-"
ABANDONED_AFTER_S = 60.0
FREED_SHARE = 0.9
"""What is left of the bound after making room, so that it is not made for every block."""

logger = logging.getLogger(__name__)


class DiskTier:
    """See Tier."""

    name = "disk"

    def __init__(self, folder: Path, namespace: str, max_bytes: int):
        """Raises: OSError: the folder cannot be made or written."""
        self.counters = TierCounters()
        self._root = folder
        self._folder = folder / namespace
        self._max_bytes = max_bytes
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock_path = folder / ".lock"
        self._lock_path.touch(mode=0o600)
        self._num_bytes = 0
        self._num_unchecked_bytes = 0
        self._make_room(0)

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        """See Tier."""
        # NOTE: unlike Path.exists, no error of the storage is raised.
        return [os.path.exists(self._path(block_hash)) for block_hash in hashes]

    def read(self, block_hash: bytes, into: memoryview) -> bool:
        """See Tier. A file that is not intact is deleted."""
        path = self._path(block_hash)
        try:
            with path.open("rb", buffering=0) as file:
                header = file.read(HEADER.size)
                is_whole = _fill(file.fileno(), into) and not file.read(1)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._fail("read", path, error)
            return False
        if not is_whole or not is_intact(header, block_hash, into):
            logger.warning("%s is damaged: dropped", path)
            self.counters.num_corrupt += 1
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        with contextlib.suppress(OSError):
            os.utime(path)
        self.counters.num_read += 1
        return True

    def write(self, block_hash: bytes, data: memoryview) -> bool:
        """See Tier."""
        num_bytes = HEADER.size + len(data)
        if num_bytes > self._max_bytes:
            return False
        path = self._path(block_hash)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
        try:
            # NOTE: somebody may have emptied the folder.
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if (
                self._num_bytes + num_bytes > self._max_bytes
                or self._num_unchecked_bytes + num_bytes > CHECK_BYTES
            ):
                self._make_room(num_bytes)
            with temporary.open("wb", buffering=0) as file:
                file.write(pack_header(block_hash, data))
                written = 0
                while written < len(data):
                    written += file.write(data[written:])
            temporary.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._fail("write", path, error)
            return False
        self._num_bytes += num_bytes
        self._num_unchecked_bytes += num_bytes
        self.counters.num_written += 1
        return True

    def num_used_bytes(self) -> int:
        """See Tier."""
        return self._num_bytes

    def close(self) -> None:
        """See Tier; the files stay."""

    def _path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self._folder / name[:2] / name

    def _make_room(self, num_bytes: int) -> None:
        """Count what all workers left here, and delete the oldest if it is too much."""
        with self._lock_path.open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            files = sorted(self._files())
            used = sum(size for _, size, _ in files)
            if used + num_bytes > self._max_bytes:
                for _, size, path in files:
                    if used + num_bytes <= self._max_bytes * FREED_SHARE:
                        break
                    path.unlink(missing_ok=True)
                    used -= size
                    self.counters.num_evicted += 1
        self._num_bytes = used
        self._num_unchecked_bytes = 0

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """(time of last use, bytes, path) of every block; abandoned temporary files are deleted."""
        for path in self._root.glob("*/*/*"):
            try:
                status = path.stat()
            except OSError:
                continue
            if not path.name.startswith(TEMPORARY_PREFIX):
                yield status.st_mtime, status.st_size, path
            elif time.time() - status.st_mtime > ABANDONED_AFTER_S:
                path.unlink(missing_ok=True)

    def _fail(self, what: str, path: Path, error: OSError) -> None:
        if not self.counters.num_failures:
            logger.warning("disk tier cannot %s %s: %s (counted from now on)", what, path, error)
        self.counters.num_failures += 1


def _fill(fd: int, into: memoryview) -> bool:
    """Read until `into` is full; False: the file ended before."""
    filled = 0
    while filled < len(into):
        num = os.readv(fd, [into[filled:]])
        if num == 0:
            return False
        filled += num
    return True
