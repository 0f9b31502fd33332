"""Mooncake's TransferEngine: TCP everywhere, RDMA or Ascend where the wheel and the hardware have
it.

Segments are submitted one by one and polled, with a window on how many are in flight. The batch
calls are not used: they wait in a busy loop that takes a core from the model, report the first
failure while other segments are still moving, and cannot be told a deadline below 5 s. With one id
a segment it is always known whether anything may still touch memory. Measured on two cores over
loopback TCP with 24 KiB segments: 0.85 GiB/s against 0.22 GiB/s for batches of 512.

A completed write has been acknowledged by the peer after the last byte was stored (the engine's TCP
framing 2), so it has landed.

Source: https://kvcache-ai.github.io/Mooncake/ (Transfer Engine Python API) and behaviour of
mooncake-transfer-engine-non-cuda 0.3.13.post1.
"""

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

# NOTE: the engine reads its log level from the environment when it is loaded and has no call for
# it; without this every start prints a dozen lines. A level that the user exported is kept.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

from mooncake.engine import TransferEngine

from kvtransfer.errors import TransferError, TransportUnavailable
from kvtransfer.registration import KVMemory
from kvtransfer.transports.base import Segment
from protos import worker_pb2

NAME = "mooncake"
POLL_INTERVAL_S = 0.0002
SUBMIT_ATTEMPTS = 6
SUBMIT_BACKOFF_S = 0.01
PENDING, COMPLETED = 0, 1

logger = logging.getLogger(__name__)


class MooncakeConnection:
    """One peer of the engine; the engine pools its sockets."""

    def __init__(
        self,
        engine: TransferEngine,
        address: str,
        max_in_flight_segments: int,
        max_in_flight_bytes: int,
        bind_thread: Callable[[], None],
    ):
        self.num_bytes = 0
        self._bind_thread = bind_thread
        self._engine = engine
        self._address = address
        self._max_segments = max_in_flight_segments
        self._max_bytes = max_in_flight_bytes
        self._unsettled: list[int] = []
        """Ids of segments that a failed write left behind."""

    def write(
        self,
        segments: Sequence[Segment],
        deadline: Callable[[], float],
        meanwhile: Callable[[], None],
    ) -> None:
        """See Connection.write."""
        # NOTE: an Ascend device is chosen thread by thread, and whoever calls has one of its own.
        self._bind_thread()
        if self.num_unsettled():
            raise TransferError(f"{self._address} still has segments of a failed write in flight")
        in_flight: deque[tuple[int, int]] = deque()
        try:
            in_flight_bytes = 0
            for segment in segments:
                while in_flight and (
                    len(in_flight) >= self._max_segments
                    or in_flight_bytes + segment.num_bytes > self._max_bytes
                ):
                    in_flight_bytes -= self._await_oldest(in_flight, deadline)
                in_flight.append((self._submit(segment, deadline()), segment.num_bytes))
                in_flight_bytes += segment.num_bytes
            meanwhile()
            while in_flight:
                self._await_oldest(in_flight, deadline)
        finally:
            self._unsettled.extend(transfer_id for transfer_id, _ in in_flight)

    def num_unsettled(self) -> int:
        """See Connection."""
        self._unsettled = [
            transfer_id
            for transfer_id in self._unsettled
            if self._engine.transfer_check_status(transfer_id) == PENDING
        ]
        return len(self._unsettled)

    def close(self) -> None:
        """See Connection; the engine keeps its sockets until it is closed itself."""

    def _submit(self, segment: Segment, deadline_s: float) -> int:
        source_address, target_address, num_bytes = segment
        backoff_s = SUBMIT_BACKOFF_S
        for _ in range(SUBMIT_ATTEMPTS):
            transfer_id = int(
                self._engine.transfer_submit_write(
                    self._address, source_address, target_address, num_bytes
                )
            )
            if transfer_id:
                return transfer_id
            if time.monotonic() + backoff_s > deadline_s:
                break
            time.sleep(backoff_s)
            backoff_s *= 2
        raise TransferError(f"Mooncake does not take segments for {self._address}")

    def _await_oldest(
        self, in_flight: deque[tuple[int, int]], deadline: Callable[[], float]
    ) -> int:
        """Wait for the segment submitted first; return its size. It has left in_flight unless the
        deadline passed.
        """
        transfer_id, num_bytes = in_flight[0]
        while (status := self._engine.transfer_check_status(transfer_id)) == PENDING:
            if time.monotonic() > deadline():
                raise TransferError(
                    f"deadline passed with {len(in_flight)} segments on the way to {self._address}"
                )
            time.sleep(POLL_INTERVAL_S)
        in_flight.popleft()
        if status != COMPLETED:
            raise TransferError(
                f"Mooncake failed a segment of {num_bytes} bytes to {self._address}"
            )
        self.num_bytes += num_bytes
        return num_bytes


class MooncakeTransport:
    """See Transport. Holds the one TransferEngine of this process."""

    name = NAME
    crosses_network = True
    is_landing_guaranteed = True

    def __init__(
        self,
        *,
        host: str,
        protocol: str,
        max_in_flight_segments: int,
        max_in_flight_bytes: int,
    ):
        """Start an engine on a free port.

        Raises: TransportUnavailable: with what the engine printed.
        """
        self._host = host
        self._max_segments = max_in_flight_segments
        self._max_bytes = max_in_flight_bytes
        self._memory: KVMemory | None = None
        engine = TransferEngine()
        with _captured_stderr() as output:
            code = engine.initialize(f"{host}:0", "P2PHANDSHAKE", protocol, "")
        if code:
            raise TransportUnavailable(
                f"Mooncake cannot start with {protocol} on {host} ({code}): {output[0].strip()}"
            )
        self._engine: TransferEngine | None = engine
        self._address = f"{host}:{engine.get_rpc_port()}"

    def register(self, memory: KVMemory) -> None:
        """See Transport."""
        assert self._engine is not None, "closed"
        code = self._engine.register_memory(memory.base_address, memory.num_bytes)
        if code:
            raise TransportUnavailable(
                f"Mooncake cannot register {memory.num_bytes} bytes ({code})"
            )
        self._memory = memory

    def endpoint(self) -> worker_pb2.TransferEndpoint:
        """See Transport."""
        assert self._memory is not None, "register comes first"
        return worker_pb2.TransferEndpoint(
            transport=NAME,
            address=self._address,
            regions=[region.to_proto() for region in self._memory.regions],
        )

    def connect(
        self, endpoint: worker_pb2.TransferEndpoint, deadline_s: float
    ) -> MooncakeConnection:
        """See Transport."""
        engine = self._engine
        assert engine is not None, "closed"
        codes: list[int] = []
        # NOTE: opening a peer blocks inside the engine, under a lock that all peers share, for as
        # long as the peer does not answer. So ask first, where only a thread of ours can get stuck.
        probe = threading.Thread(
            target=lambda: codes.append(engine.send_probe(endpoint.address)),
            name="kv-probe",
            daemon=True,
        )
        probe.start()
        probe.join(max(deadline_s - time.monotonic(), 0.0))
        if codes != [0]:
            raise TransportUnavailable(f"Mooncake cannot reach {endpoint.address} ({codes})")
        assert self._memory is not None, "register comes first"
        return MooncakeConnection(
            engine,
            endpoint.address,
            self._max_segments,
            self._max_bytes,
            self._memory.bind_thread,
        )

    def close(self) -> None:
        """See Transport. May take a second: the engine joins its threads."""
        if self._engine is not None and self._memory is not None:
            self._engine.unregister_memory(self._memory.base_address)
        self._memory = None
        self._engine = None


@contextlib.contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """Collect what native code prints during start-up: noise when it works, the reason when it does
    not.
    """
    output: list[str] = []
    saved = os.dup(2)
    try:
        with tempfile.TemporaryFile() as sink:
            os.dup2(sink.fileno(), 2)
            try:
                yield output
            finally:
                os.dup2(saved, 2)
                sink.seek(0)
                output.append(sink.read().decode(errors="replace"))
    finally:
        os.close(saved)
    logger.debug("Mooncake engine start: %s", output[0])
