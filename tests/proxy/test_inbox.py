"""Readers of inboxes: order, deadlines, and turns that leave the event loop to others."""

import asyncio

import pytest

from proxy.inbox import Inbox, WakeQueue


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_messages_come_in_order_whether_awaited_or_not() -> None:
    inbox: Inbox[int] = Inbox(WakeQueue())
    reader = asyncio.create_task(inbox.get(now_s() + 5))
    await asyncio.sleep(0)
    for number in range(3):
        inbox.put(number)
    assert [await reader, await inbox.get(now_s()), await inbox.get(now_s())] == [0, 1, 2]
    inbox.close()


async def test_a_deadline_ends_the_wait_also_when_it_moved() -> None:
    inbox: Inbox[int] = Inbox(WakeQueue())
    for far_s, near_s in ((30.0, 0.01), (0.01, 0.03)):
        reader = asyncio.create_task(inbox.get(now_s() + far_s))
        await asyncio.sleep(0)
        inbox.put(1)
        assert await reader == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5) as guard:
                await inbox.get(now_s() + near_s)
        assert not guard.expired()
    inbox.close()


async def test_a_cancelled_reader_loses_no_message() -> None:
    inbox: Inbox[int] = Inbox(WakeQueue())
    reader = asyncio.create_task(inbox.get(now_s() + 5))
    await asyncio.sleep(0)
    inbox.put(7)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await inbox.get(now_s() + 5) == 7
    inbox.close()


async def test_many_readers_leave_turns_to_others_and_find_what_came_meanwhile() -> None:
    wakes = WakeQueue()
    inboxes: list[Inbox[int]] = [Inbox(wakes) for _ in range(1000)]
    together: list[int] = []

    async def read(inbox: Inbox[int]) -> None:
        num = 0
        await inbox.get(now_s() + 5)
        num += 1
        while inbox.take_if(lambda _: True) is not None:
            num += 1
        together.append(num)

    readers = [asyncio.create_task(read(inbox)) for inbox in inboxes]
    await asyncio.sleep(0)
    for inbox in inboxes:
        inbox.put(1)
    num_turns = 0
    while not all(reader.done() for reader in readers):
        await asyncio.sleep(0)
        num_turns += 1
        if num_turns == 3:  # the next step of the worker
            for inbox in inboxes:
                inbox.put(2)
    assert num_turns > 10
    assert together[0] == 1
    assert together[-1] == 2
    for inbox in inboxes:
        inbox.close()
