"""Moments that timers of one process share, so that it wakes once for all of them."""

import asyncio


def until_tick_s(interval_s: float) -> float:
    """Seconds until the event loop's clock is a multiple of `interval_s`."""
    return interval_s - asyncio.get_running_loop().time() % interval_s
