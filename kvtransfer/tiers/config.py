"""Where prefixes are kept beyond the KV cache of a worker."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge


@dataclass(frozen=True, kw_only=True, slots=True)
class TierConfig:
    """Tiers of prefix blocks, fastest first; all off by default."""

    host_bytes: Annotated[int, Ge(0)] = 0
    """Host memory of one rank of a prefiller for blocks that left its KV cache; 0: none."""
    disk_path: str = ""
    """Folder that all workers of a host share; empty: none. It outlives them."""
    disk_bytes: Annotated[int, Ge(1 << 20)] = 8 << 30
    """Most that the folder holds; what was used least recently is deleted first."""
    store_address: str = ""
    """host:port of a mooncake_master, whose store all workers of all hosts share; empty: none."""
    store_segment_bytes: Annotated[int, Ge(0)] = 0
    """Memory that each worker lends to the store, and takes with it when it ends; 0: none."""
    store_buffer_bytes: Annotated[int, Ge(16 << 20)] = 64 << 20
    """Memory of one worker through which blocks go to the store and come from it."""
    max_pinned_blocks: Annotated[int, Ge(1)] = 16
    """Blocks of the KV cache that are held at once while they are copied to the tiers."""

    @property
    def is_on(self) -> bool:
        """Whether there is any tier."""
        return bool(self.host_bytes or self.disk_path or self.store_address)
