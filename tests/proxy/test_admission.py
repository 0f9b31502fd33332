"""The gate: permits, order, bounds and cancellation."""

import asyncio

import pytest

from proxy.admission import Admission
from proxy.config import ProxyConfig
from proxy.errors import Overloaded


def gate(**settings: object) -> Admission:
    config = {
        "model_path": "",
        "served_model_names": ("m",),
        "controller_address": "",
        "max_concurrent_requests": 2,
        **settings,
    }
    return Admission(ProxyConfig(**config))  # type: ignore[arg-type]


async def enter(admission: Admission, permits: int, log: list[int], hold_s: float = 0.0) -> None:
    async with admission.admit(permits):
        log.append(permits)
        await asyncio.sleep(hold_s)


async def test_waiters_are_served_in_order_and_large_ones_do_not_starve() -> None:
    admission, log = gate(), list[int]()
    async with admission.admit(2):
        tasks = []
        for permits in (1, 2, 1):
            tasks.append(asyncio.create_task(enter(admission, permits, log, 0.01)))
            await asyncio.sleep(0)
        assert admission.num_queued == 3
    await asyncio.gather(*tasks)
    assert log == [1, 2, 1]
    assert (admission.num_admitted, admission.num_queued) == (0, 0)


async def test_a_request_larger_than_the_gate_takes_all_of_it() -> None:
    admission = gate()
    async with asyncio.timeout(1), admission.admit(100):
        assert admission.num_admitted == 1


async def test_a_full_queue_and_a_long_wait_are_overload() -> None:
    admission = gate(max_queued_requests=1, queue_timeout_s=0.05)
    async with admission.admit(2):
        waiting = asyncio.create_task(enter(admission, 1, []))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="wait already"):
            await enter(admission, 1, [])
        with pytest.raises(Overloaded, match="no capacity within"):
            await waiting
        assert admission.num_queued == 0
    await enter(admission, 2, [])


async def test_cancelled_waiters_give_way_and_lose_no_permit() -> None:
    admission, log = gate(), list[int]()
    async with admission.admit(2):
        first = asyncio.create_task(enter(admission, 2, log))
        second = asyncio.create_task(enter(admission, 1, log))
        await asyncio.sleep(0)
        first.cancel()
    await second
    assert log == [1]
    # Cancelled in the very moment of admission: the permit must come back.
    async with admission.admit(2):
        third = asyncio.create_task(enter(admission, 2, log))
        await asyncio.sleep(0)
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    async with asyncio.timeout(1), admission.admit(2):
        assert admission.num_admitted == 1
