"""Which transports this process can use, and why not the others."""

import hashlib
import importlib
import logging
import os
import socket
from dataclasses import dataclass

from kvtransfer.config import KVTransferConfig
from kvtransfer.errors import TransportUnavailable
from kvtransfer.registration import KVMemory
from kvtransfer.transports.base import Transport
from kvtransfer.transports.hccl import HCCLTransport
from kvtransfer.transports.memory import MemoryTransport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedTransports:
    """Transports with the memory registered, best first."""

    transports: tuple[Transport, ...]
    host_id: str

    @property
    def names(self) -> list[str]:
        """For the handshake."""
        return [transport.name for transport in self.transports]

    def named(self, name: str) -> Transport:
        """The transport called `name`. Raises: TransportUnavailable: it is not loaded here."""
        for transport in self.transports:
            if transport.name == name:
                return transport
        raise TransportUnavailable(f"transport {name} is not loaded, have {self.names}")

    def close(self) -> None:
        """Close all."""
        for transport in self.transports:
            transport.close()


def load_transports(config: KVTransferConfig, memory: KVMemory) -> LoadedTransports:
    """Load what the config allows and register `memory` with each.

    Raises: TransportUnavailable: none can be loaded; says why for each.
    """
    wanted = config.auto_order if config.transport == "auto" else (config.transport,)
    transports: list[Transport] = []
    reasons = []
    for name in wanted:
        try:
            transport = _load(name, config)
            transport.register(memory)
        except TransportUnavailable as error:
            reasons.append(f"{name}: {error}")
        else:
            transports.append(transport)
    if not transports:
        raise TransportUnavailable("; ".join(reasons))
    logger.log(
        logging.WARNING if reasons else logging.INFO,
        "KV transports: %s (config %s)%s",
        ", ".join(transport.name for transport in transports),
        config.transport,
        f"; not usable: {'; '.join(reasons)}" if reasons else "",
    )
    return LoadedTransports(tuple(transports), host_id())


def host_id() -> str:
    """Equal for two processes that can find each other's /proc entries: same boot, same pid
    namespace.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
    return hashlib.sha256(f"{boot_id} {namespace}".encode()).hexdigest()[:32]


def _load(name: str, config: KVTransferConfig) -> Transport:
    if name == "memory":
        return MemoryTransport()
    if name == "hccl":
        return HCCLTransport(
            backend=config.hccl_backend, host=config.host, timeout_s=config.progress_timeout_s
        )
    try:
        # NOTE: imported here because it is the one transport whose library may be missing or may
        # not load.
        module = importlib.import_module("kvtransfer.transports.mooncake")
    except ImportError as error:
        # Typically a system library of the wheel: libibverbs1, librdmacm1, libnuma1.
        raise TransportUnavailable(f"cannot import mooncake: {error}") from error
    transport: Transport = module.MooncakeTransport(
        host=config.host,
        protocol=config.mooncake_protocol,
        max_in_flight_segments=config.max_in_flight_segments,
        max_in_flight_bytes=config.max_in_flight_bytes,
    )
    return transport
