"""What HCCL reads from its process's environment, as settings: it has no other way to be told.

Variables must be set before torch_npu is imported, in every process that communicates. Imports
nothing heavy, so that they can be.

Source: Ascend/pytorch, docs on environment variables; CANN's pages of HCCL.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le, Len

_EVENT_AFTER_EXEC_S = 32
"""HCCL wants its events to wait longer than its operators: 1868 s and 1836 s by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HCCLConfig:
    """Communication between NPUs; None leaves a setting to the environment and to HCCL."""

    buffer_mib: Annotated[int, Ge(1), Le(1 << 20)] | None = None
    """Memory of each communicator, MiB (HCCL_BUFFSIZE, 200). Dispatch to experts may need more."""
    connect_timeout_s: Annotated[int, Ge(120), Le(7200)] | None = None
    """How long ranks wait for each other when they connect (HCCL_CONNECT_TIMEOUT, 120)."""
    exec_timeout_s: Annotated[int, Ge(1), Le(17340)] | None = None
    """How long a rank waits for the others in an operation (HCCL_EXEC_TIMEOUT)."""
    socket_ifname: Annotated[str, Len(1)] | None = None
    """Network interfaces for control messages (HCCL_SOCKET_IFNAME); None takes the one that has the
    worker's address.
    """

    def variables(self, host: str, given: Mapping[str, str]) -> dict[str, str]:
        """What to set in the environment `given` of a worker at the address `host`."""
        found = {}
        if self.buffer_mib is not None:
            found["HCCL_BUFFSIZE"] = str(self.buffer_mib)
        if self.connect_timeout_s is not None:
            found["HCCL_CONNECT_TIMEOUT"] = str(self.connect_timeout_s)
        if self.exec_timeout_s is not None:
            found["HCCL_EXEC_TIMEOUT"] = str(self.exec_timeout_s)
            found["HCCL_EVENT_TIMEOUT"] = str(self.exec_timeout_s + _EVENT_AFTER_EXEC_S)
        if self.socket_ifname is not None:
            found["HCCL_SOCKET_IFNAME"] = self.socket_ifname
        elif not {"HCCL_SOCKET_IFNAME", "HCCL_IF_IP"} & given.keys() and not _is_loopback(host):
            # NOTE: an address goes before a name: it must not stand beside one.
            found["HCCL_IF_IP"] = host
        return found


def _is_loopback(host: str) -> bool:
    """On one machine HCCL finds an interface itself, and does not take the loopback."""
    return host.startswith("127.") or host in ("::1", "localhost")


def worker_variables(
    worker: Mapping[str, Any], host: str, given: Mapping[str, str]
) -> dict[str, str]:
    """The variables of a process that runs WorkerConfig `worker`, as plain values."""
    if worker["ops_backend"] != "npu":
        return {}
    return HCCLConfig(**worker["hccl"]).variables(host, given)
