"""Blocks in a Mooncake Store: one pool of memory that all workers of all hosts share.

The master (`mooncake_master`) keeps the index, evicts and grants leases; memory comes from clients
that lend a segment. What a worker lent is lost when it ends, so blocks that should outlive workers
need a lender of their own (`mooncake_client`).

Source: https://kvcache-ai.github.io/Mooncake/ (Mooncake Store Python API) and behaviour of
mooncake-transfer-engine-non-cuda 0.3.13.post1.
"""

import logging
import time
from collections.abc import Sequence

from mooncake.store import MooncakeDistributedStore

from kvtransfer.errors import TransportUnavailable
from kvtransfer.tiers.base import TierCounters
from kvtransfer.tiers.frame import HEADER, is_intact, pack_header

logger = logging.getLogger(__name__)

RPC_FAIL = -900
"""Mooncake's code for a master that does not answer."""
RETRY_S = 30.0
"""Until it is asked again: each call to a dead one takes some four seconds."""


class StoreTier:
    """See Tier. The master bounds it and evicts."""

    name = "store"

    def __init__(
        self, address: str, namespace: str, *, host: str, segment_bytes: int, buffer_bytes: int
    ):
        """Connect to the master. Raises: TransportUnavailable: it does not answer."""
        self.counters = TierCounters()
        self._namespace = namespace
        self._not_before_s = 0.0
        self._store: MooncakeDistributedStore | None = MooncakeDistributedStore()
        code = self._store.setup(
            host, "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", "", address
        )
        if code:
            self._store = None
            raise TransportUnavailable(f"no Mooncake master at {address} ({code})")

    def contains(self, hashes: Sequence[bytes]) -> list[bool]:
        """See Tier."""
        if self._store is None or not self._is_reachable() or not hashes:
            return [False] * len(hashes)
        codes = self._store.batch_is_exist([self._key(block_hash) for block_hash in hashes])
        if RPC_FAIL in codes:
            self._leave_alone()
        return [code == 1 for code in codes] or [False] * len(hashes)

    def read(self, block_hash: bytes, into: memoryview) -> bool:
        """See Tier. A value that is not intact is removed."""
        if self._store is None or not self._is_reachable():
            return False
        value = memoryview(self._store.get(self._key(block_hash)))
        if not value:
            return False
        data = value[HEADER.size :]
        if len(data) != len(into) or not is_intact(bytes(value[: HEADER.size]), block_hash, data):
            logger.warning("block %s of the store is damaged: dropped", block_hash.hex())
            self.counters.num_corrupt += 1
            # NOTE: by force, since every reading leases the value for some seconds; who reads it
            # meanwhile finds that it is damaged, too.
            self._store.remove(self._key(block_hash), True)
            return False
        into[:] = data
        self.counters.num_read += 1
        return True

    def write(self, block_hash: bytes, data: memoryview) -> bool:
        """See Tier."""
        if self._store is None or not self._is_reachable():
            return False
        frame = pack_header(block_hash, data) + bytes(data)
        if code := self._store.put(self._key(block_hash), frame):
            if code == RPC_FAIL:
                self._leave_alone()
            else:
                self.counters.num_failures += 1
            return False
        self.counters.num_written += 1
        return True

    def num_used_bytes(self) -> int:
        """See Tier; only the master knows."""
        return 0

    def close(self) -> None:
        """See Tier."""
        if self._store is not None:
            self._store.close()
        self._store = None

    def _is_reachable(self) -> bool:
        return time.monotonic() >= self._not_before_s

    def _leave_alone(self) -> None:
        logger.warning("the Mooncake master does not answer: next asked in %.0f s", RETRY_S)
        self.counters.num_failures += 1
        self._not_before_s = time.monotonic() + RETRY_S

    def _key(self, block_hash: bytes) -> str:
        return f"pdserve/{self._namespace}/{block_hash.hex()}"
