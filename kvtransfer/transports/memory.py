"""Same host: the writer maps the reader's memfd and copies into it; the bytes move once.

The writer opens /proc/<pid>/fd/<n>, so it needs the permissions of the reader's user. Pids are
reused, so the last bytes of the file must equal the nonce that came over the link before anything
is written.
"""

import ctypes
import hmac
import json
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from kvtransfer.errors import TransferError, TransportUnavailable
from kvtransfer.registration import NONCE_BYTES, KVMemory
from kvtransfer.transports.base import Segment
from protos import worker_pb2

NAME = "memory"
CLOCK_BYTES = 1 << 20
"""Copied between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """Where a reader's memfd is found, as JSON in TransferEndpoint.address."""

    pid: int
    fd: int
    base_address: int
    num_bytes: int
    nonce: str


class MemoryConnection:
    """A mapping of one reader's memfd."""

    def __init__(self, mapping: mmap.mmap, base_address: int):
        self.num_bytes = 0
        self._mapping = mapping
        self._size = len(mapping) - NONCE_BYTES
        self._base_address = base_address
        anchor = ctypes.c_char.from_buffer(mapping)
        self._local_address = ctypes.addressof(anchor)
        del anchor

    def write(
        self,
        segments: Sequence[Segment],
        deadline: Callable[[], float],
        meanwhile: Callable[[], None],
    ) -> None:
        """See Connection.write. Nothing is touched after it returns or raises."""
        if self._mapping.closed:
            raise TransferError("the connection is closed")
        base, size, local, move = (
            self._base_address,
            self._size,
            self._local_address,
            ctypes.memmove,
        )
        num_moved = 0
        try:
            for source_address, target_address, num_bytes in segments:
                offset = target_address - base
                if offset < 0 or num_bytes < 0 or offset + num_bytes > size:
                    raise TransferError(
                        f"target offset {offset} with {num_bytes} bytes lies outside {size} bytes"
                    )
                move(local + offset, source_address, num_bytes)
                num_moved += num_bytes
                if num_moved >= CLOCK_BYTES:
                    self.num_bytes += num_moved
                    num_moved = 0
                    if time.monotonic() > deadline():
                        raise TransferError("deadline passed while copying through shared memory")
        finally:
            self.num_bytes += num_moved
        meanwhile()

    def num_unsettled(self) -> int:
        """See Connection; a copy is over when write returns."""
        return 0

    def close(self) -> None:
        """See Connection."""
        self._mapping.close()


class MemoryTransport:
    """See Transport."""

    name = NAME
    crosses_network = False
    is_landing_guaranteed = True

    def __init__(self) -> None:
        self._memory: KVMemory | None = None

    def register(self, memory: KVMemory) -> None:
        """See Transport."""
        if memory.fd is None:
            raise TransportUnavailable("this system has no memfd_create")
        self._memory = memory

    def endpoint(self) -> worker_pb2.TransferEndpoint:
        """See Transport."""
        memory = self._memory
        assert memory is not None, "register comes first"
        assert memory.fd is not None, "register checked it"
        address = MemoryAddress(
            pid=os.getpid(),
            fd=memory.fd,
            base_address=memory.base_address,
            num_bytes=memory.num_bytes,
            nonce=memory.nonce.hex(),
        )
        return worker_pb2.TransferEndpoint(
            transport=NAME,
            address=json.dumps(asdict(address)),
            regions=[region.to_proto() for region in memory.regions],
        )

    def connect(self, endpoint: worker_pb2.TransferEndpoint, deadline_s: float) -> MemoryConnection:
        """See Transport.

        Raises: TransportUnavailable: no permission, no such process, or not the memory that was
        announced.
        """
        address = MemoryAddress(**json.loads(endpoint.address))
        path = f"/proc/{address.pid}/fd/{address.fd}"
        try:
            # NOTE: O_NONBLOCK: after a pid was reused the descriptor may be a pipe, on which open
            # would wait.
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransportUnavailable(f"cannot open the peer's memory {path}: {error}") from error
        try:
            if os.fstat(fd).st_size != address.num_bytes:
                raise TransportUnavailable(f"{path} is not the memory that the peer announced")
            mapping = mmap.mmap(fd, address.num_bytes)
        except (OSError, ValueError) as error:
            raise TransportUnavailable(f"cannot map {path}: {error}") from error
        finally:
            os.close(fd)
        if not hmac.compare_digest(mapping[-NONCE_BYTES:], bytes.fromhex(address.nonce)):
            mapping.close()
            raise TransportUnavailable(f"{path} does not hold the nonce that the peer announced")
        return MemoryConnection(mapping, address.base_address)

    def close(self) -> None:
        """See Transport; the memory belongs to its owner."""
        self._memory = None
