"""From a configuration to the tiers of one worker."""

import importlib
import logging
import os
from pathlib import Path

from kvtransfer.errors import TransportUnavailable
from kvtransfer.tiers.base import Tier, TierStack
from kvtransfer.tiers.config import TierConfig
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.host import HostTier

logger = logging.getLogger(__name__)


def load_tiers(config: TierConfig, namespace: str, *, host: str, with_host: bool) -> TierStack:
    """Open what the configuration names; a tier that cannot be opened is left out, with a warning.

    namespace: equal exactly where blocks of equal hash hold equal bytes. with_host: False for a
    worker that only writes, whose own memory would serve nobody.
    """
    tiers: list[Tier] = []
    if config.host_bytes and with_host:
        tiers.append(HostTier(config.host_bytes))
    if config.disk_path:
        folder = Path(config.disk_path).expanduser()
        try:
            tiers.append(DiskTier(folder, namespace, config.disk_bytes))
        except OSError as error:
            logger.warning("no disk tier: %s", error)
    if config.store_address:
        try:
            tiers.append(_open_store(config, namespace, host))
        except TransportUnavailable as error:
            logger.warning("no store tier: %s", error)
    return TierStack(tuple(tiers))


def _open_store(config: TierConfig, namespace: str, host: str) -> Tier:
    # NOTE: read when the library is loaded; without it each call prints a line.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        module = importlib.import_module("kvtransfer.tiers.store")
    except ImportError as error:
        raise TransportUnavailable(f"cannot import mooncake: {error}") from error
    tier: Tier = module.StoreTier(
        config.store_address,
        namespace,
        host=host,
        segment_bytes=config.store_segment_bytes,
        buffer_bytes=config.store_buffer_bytes,
    )
    return tier
