"""How KV moves between workers: transport, limits and deadlines."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

MIB = 1024 * 1024
SAMPLE_EVERY = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class KVTransferConfig:
    """Settings of one process; writer and reader may differ, the handshake finds what both have."""

    transport: Literal["auto", "memory", "mooncake", "hccl"] = "auto"
    """auto: the first of auto_order that both ends can load and that reaches the peer."""
    auto_order: tuple[Literal["memory", "mooncake", "hccl"], ...] = ("mooncake", "memory")
    """The path of production first, also on one host; shared memory where Mooncake cannot load."""
    host: str = "127.0.0.1"
    """Address of this host that peers reach; the Mooncake engine announces it."""
    mooncake_protocol: Literal["tcp", "rdma", "ascend"] = "tcp"
    """What Mooncake moves bytes with."""
    hccl_backend: Literal["gloo", "hccl"] = "gloo"
    """What the hccl transport moves bytes with: hccl on Ascend, gloo where there is none."""
    checksum: Literal["auto", "full", "sampled", "off"] = "auto"
    """full: all bytes are hashed by both ends and compared before the reader may use them. sampled:
    one run of bytes in SAMPLE_EVERY. auto: sampled within a host's memory, full on a network.
    """
    connect_timeout_s: Annotated[float, Gt(0)] = 2.0
    """For one attempt to open a link, handshake included."""
    progress_timeout_s: Annotated[float, Gt(0)] = 4.0
    """A transfer with work to do (link, grant, bytes) and no progress for this long has failed."""
    transfer_timeout_s: Annotated[float, Gt(0)] = 30.0
    """From finish() to the last byte. Time that the prefiller needs to compute does not count."""
    abort_patience_s: Annotated[float, Ge(0)] = 0.5
    """For a write that is under way when its transfer is given up. One that ends in it leaves
    nothing to wait for; the others cost quarantine_grace_s.
    """
    backoff_initial_s: Annotated[float, Gt(0)] = 0.05
    """Pause before a failed peer is tried again; doubles with each failure. No peer is banned."""
    backoff_max_s: Annotated[float, Gt(0)] = 1.0
    """Longest such pause; below progress_timeout_s, so that a transfer outlives it."""
    max_batch_bytes: Annotated[int, Ge(1)] = 8 * MIB
    """Bytes handed to a transport at once; an abort takes effect between batches."""
    min_batch_bytes: Annotated[int, Ge(0)] = 4 * MIB
    """Layers are written as they are computed, but not in less than this while more is to come:
    each batch wakes threads that take a core from what computes.
    """
    report_bytes: Annotated[int, Ge(1)] = 8 * MIB
    """Bytes to hash, of whole layers that are written, that the reader is told of, to verify them
    while the rest is on its way.
    """
    max_in_flight_bytes: Annotated[int, Ge(1)] = 16 * MIB
    """Bytes that may be on the way to one peer."""
    max_in_flight_segments: Annotated[int, Ge(1)] = 64
    """Segments on the way to one peer. Mooncake queues 1,024 a peer and fails what exceeds it."""
    quarantine_grace_s: Annotated[float, Ge(0)] = 1.0
    """Wait for bytes left in socket buffers after a link or a write broke, before blocks are
    reused.
    """
    landing_timeout_s: Annotated[float, Ge(0)] = 0.5
    """For transports whose completion is not arrival: how long a checksum may take to come right.
    """

    def checksum_every(self, *, crosses_network: bool) -> int:
        """One of how many runs a writer hashes; 0: none."""
        if self.checksum == "auto":
            return 1 if crosses_network else SAMPLE_EVERY
        return {"full": 1, "sampled": SAMPLE_EVERY, "off": 0}[self.checksum]
