"""A transport that does what a broken one would, at the seam where bytes leave this room."""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence

from kvtransfer.errors import TransferError
from kvtransfer.registration import KVMemory
from kvtransfer.transports.base import Connection, Segment
from kvtransfer.transports.loading import LoadedTransports, host_id
from kvtransfer.transports.memory import MemoryTransport
from protos import worker_pb2


class Faults:
    """What to do wrong, set by a test while transfers run."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.flip_after_write = False
        self.drop_writes = False
        self.truncate_by = 0
        self.late_writes: list[tuple[Connection, Sequence[Segment]]] = []
        self.late_s = 0.0
        self.error = ""
        self.num_unsettled = 0
        self.is_landing_guaranteed = True


class FaultyConnection:
    def __init__(self, inner: Connection, faults: Faults):
        self._inner = inner
        self._faults = faults
        self._rest = 0

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes + self._rest

    def write(
        self,
        segments: Sequence[Segment],
        deadline: Callable[[], float],
        meanwhile: Callable[[], None],
    ) -> None:
        meanwhile()
        faults = self._faults
        faults.entered.set()
        while not faults.gate.wait(0.01):
            if time.monotonic() > deadline():
                raise TransferError("deadline passed")
        if faults.error:
            raise TransferError(faults.error)
        if faults.drop_writes:
            self._rest += sum(segment.num_bytes for segment in segments)
            return
        if faults.late_s:
            self._rest += sum(segment.num_bytes for segment in segments)
            timer = threading.Timer(faults.late_s, self._write_late, (segments,))
            timer.start()
            return
        if faults.truncate_by:
            last = segments[-1]
            segments = [
                *segments[:-1],
                last._replace(num_bytes=last.num_bytes - faults.truncate_by),
            ]
            self._rest += faults.truncate_by
            faults.truncate_by = 0
        self._inner.write(segments, deadline, lambda: None)
        if faults.flip_after_write:
            faults.flip_after_write = False
            flipped = ctypes.create_string_buffer(1)
            ctypes.memmove(flipped, segments[-1].source_address, 1)
            flipped[0] = bytes([flipped.raw[0] ^ 1])
            source = ctypes.addressof(flipped)
            flip = Segment(source, segments[-1].target_address, 1)
            self._inner.write([flip], deadline, lambda: None)

    def _write_late(self, segments: Sequence[Segment]) -> None:
        before = self._inner.num_bytes
        self._inner.write(segments, lambda: float("inf"), lambda: None)
        self._rest -= self._inner.num_bytes - before

    def num_unsettled(self) -> int:
        return self._faults.num_unsettled

    def close(self) -> None:
        self._inner.close()


class FaultyTransport(MemoryTransport):
    def __init__(self, faults: Faults):
        super().__init__()
        self._faults = faults
        self.is_landing_guaranteed = faults.is_landing_guaranteed

    def connect(  # type: ignore[override]
        self, endpoint: worker_pb2.TransferEndpoint, deadline_s: float
    ) -> FaultyConnection:
        return FaultyConnection(super().connect(endpoint, deadline_s), self._faults)


def faulty(faults: Faults) -> Callable[[KVMemory], LoadedTransports]:
    """For the `transports` argument of the harness."""

    def load(memory: KVMemory) -> LoadedTransports:
        transport = FaultyTransport(faults)
        transport.register(memory)
        return LoadedTransports((transport,), host_id())

    return load
