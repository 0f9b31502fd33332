"""Full collections: when nobody is served, or late."""

import asyncio
import gc
import weakref

import pytest

from proxy.garbage import collect_at_leisure


class Cycle:
    """What only a collection can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("max_wait_s", [60.0, 0.1])
async def test_cycles_go_when_the_last_request_ended_or_the_wait_was_long(
    max_wait_s: float,
) -> None:
    num_running = 1
    task = asyncio.create_task(
        collect_at_leisure(lambda: num_running, every_s=0.01, max_wait_s=max_wait_s)
    )
    gc.disable()
    try:
        cycle = weakref.ref(Cycle())
        await asyncio.sleep(0.05)
        if max_wait_s > 1:
            assert cycle() is not None
            num_running = 0
        async with asyncio.timeout(10):
            while cycle() is not None:
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
        task.cancel()
