"""Readers of inboxes: order, deadlines, and turns that leave the event loop to others."""

import asyncio
from collections import deque

import pytest

from proxy.inbox import Inbox, TurnQueue


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_messages_come_in_order_whether_awaited_or_not() -> None:
    inbox: Inbox[int] = Inbox(TurnQueue())
    reader = asyncio.create_task(inbox.get(now_s() + 5))
    await asyncio.sleep(0)
    for number in range(3):
        inbox.put(number)
    assert [await reader, await inbox.get(now_s()), await inbox.get(now_s())] == [0, 1, 2]
    inbox.close()


async def test_a_deadline_ends_the_wait_also_when_it_moved() -> None:
    inbox: Inbox[int] = Inbox(TurnQueue())
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
    inbox: Inbox[int] = Inbox(TurnQueue())
    reader = asyncio.create_task(inbox.get(now_s() + 5))
    await asyncio.sleep(0)
    inbox.put(7)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await inbox.get(now_s() + 5) == 7
    inbox.close()


async def test_many_readers_leave_turns_to_others_and_find_what_came_meanwhile() -> None:
    wakes = TurnQueue()
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


async def test_a_function_takes_what_came_each_turn_until_it_says_no() -> None:
    inbox: Inbox[int] = Inbox(TurnQueue())
    taken: list[list[int]] = []

    def take(messages: deque[int]) -> bool:
        taken.append(list(messages))
        messages.clear()
        return taken[-1][-1] != 4

    inbox.put(0)
    consuming = asyncio.create_task(inbox.consume(take, timeout_s=5, deadline_s=now_s() + 5))
    for pair in ((1, 2), (3, 4), (5, 6)):
        await asyncio.sleep(0.001)
        for number in pair:
            inbox.put(number)
    await consuming
    assert taken == [[0], [1, 2], [3, 4]]
    assert [await inbox.get(now_s()), await inbox.get(now_s())] == [5, 6]
    inbox.close()


async def test_what_a_function_leaves_or_raises_is_not_lost() -> None:
    inbox: Inbox[int] = Inbox(TurnQueue())

    def take(messages: deque[int]) -> bool:
        if messages.popleft() == 2:
            raise ValueError("two")
        return True

    consuming = asyncio.create_task(inbox.consume(take, timeout_s=5, deadline_s=now_s() + 5))
    await asyncio.sleep(0)
    for number in range(4):
        inbox.put(number)
    with pytest.raises(ValueError, match="two"):
        await consuming
    assert await inbox.get(now_s()) == 3
    inbox.close()


async def test_a_function_waits_so_long_for_the_next_and_not_for_all() -> None:
    inbox: Inbox[int] = Inbox(TurnQueue())
    num = 0

    def take(messages: deque[int]) -> bool:
        nonlocal num
        num += len(messages)
        messages.clear()
        return True

    async def feed() -> None:
        for _ in range(6):
            await asyncio.sleep(0.05)
            inbox.put(1)

    feeding = asyncio.create_task(feed())
    with pytest.raises(TimeoutError):
        await inbox.consume(take, timeout_s=0.25, deadline_s=now_s() + 30)
    assert num == 6
    await feeding
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5) as guard:
            await inbox.consume(take, timeout_s=30, deadline_s=now_s() + 0.01)
    assert not guard.expired()
    inbox.close()
