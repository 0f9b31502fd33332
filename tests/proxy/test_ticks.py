"""Moments that timers share."""

import asyncio

from proxy.ticks import until_tick_s


async def test_timers_that_start_at_different_times_end_at_the_same_multiple() -> None:
    clock = asyncio.get_running_loop().time
    first = clock() + until_tick_s(10.0)
    await asyncio.sleep(0)
    second = clock() + until_tick_s(10.0)
    assert abs(first - second) < 1e-3 or abs(first + 10.0 - second) < 1e-3
    assert 0.0 < until_tick_s(10.0) <= 10.0
