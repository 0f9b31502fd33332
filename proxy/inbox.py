"""Messages for one attempt, and when its reader gets its turn.

One step of a worker has tokens for all of its requests. To serve every reader at once would keep
the event loop busy until the last of them is done, and the worker's next step unread. So readers
have their turns a few per round of the loop, first come first served; one that waits for its turn
finds all that came meanwhile, and sends it as one.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

MessageT = TypeVar("MessageT")

_NUM_TURNS_PER_ROUND = 32
# Timers of the loop may run this much early.
_CLOCK_SLACK_S = 0.002


class Reader(Protocol):
    """Something that waits for its turn."""

    def take_turn(self) -> None:
        """Do what there is to do; must not raise."""


class TurnQueue:
    """Gives readers their turns in order, without keeping the event loop from everything else."""

    def __init__(self) -> None:
        self._waiting: deque[Reader] = deque()
        self._is_scheduled = False

    def add(self, reader: Reader) -> None:
        """Give a reader a turn when it is its time."""
        self._waiting.append(reader)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._serve_some)

    def _serve_some(self) -> None:
        waiting = self._waiting
        for _ in range(min(_NUM_TURNS_PER_ROUND, len(waiting))):
            waiting.popleft().take_turn()
        self._is_scheduled = bool(waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._serve_some)


class Inbox(Generic[MessageT]):
    """Messages in order of arrival, for one reader at a time; `close` it at the end.

    The reader is a coroutine that waits for one message (`get`), or a function that is called
    with what came, in the turn itself (`consume`): to resume a coroutine for every token costs
    more than all that is done with it.

    Bounded by the attempt itself: a worker sends at most max_tokens outputs.
    """

    __slots__ = (
        "_deadline_s",
        "_is_queued",
        "_last_s",
        "_messages",
        "_take",
        "_timeout_s",
        "_timer",
        "_timer_s",
        "_turns",
        "_waiter",
    )

    def __init__(self, turns: TurnQueue) -> None:
        self._turns = turns
        self._messages: deque[MessageT] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[deque[MessageT]], bool] | None = None
        self._is_queued = False
        self._timeout_s = 0.0
        self._last_s = 0.0
        self._deadline_s = 0.0
        # NOTE: a timer for every message would show at one message per token. There is one, which
        # looks at the deadline when it goes off.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    def put(self, message: MessageT) -> None:
        """Add a message and have the reader served."""
        self._messages.append(message)
        if self._waiter is not None and not self._is_queued:
            self._is_queued = True
            self._turns.add(self)

    async def get(self, deadline_s: float) -> MessageT:
        """Take the oldest message.

        Raises: TimeoutError: when the loop's clock passes `deadline_s` first.
        """
        if not self._messages:
            await self._wait(deadline_s)
        return self._messages.popleft()

    def take_if(self, is_wanted: Callable[[MessageT], bool]) -> MessageT | None:
        """Take the oldest message if there is one, and it is wanted."""
        if self._messages and is_wanted(self._messages[0]):
            return self._messages.popleft()
        return None

    async def consume(
        self, take: Callable[[deque[MessageT]], bool], *, timeout_s: float, deadline_s: float
    ) -> None:
        """Call `take` with the messages, once a turn, until it returns False or raises.

        It takes at least one off the left end, or returns False.

        Raises: TimeoutError: nothing came for `timeout_s`, or the loop's clock passed `deadline_s`;
            and what `take` raises.
        """
        if self._messages and not take(self._messages):
            return
        self._take = take
        self._timeout_s = timeout_s
        self._last_s = asyncio.get_running_loop().time()
        try:
            await self._wait(deadline_s)
        finally:
            self._take = None

    def take_turn(self) -> None:
        """Serve the reader: it is this inbox's turn."""
        self._is_queued = False
        waiter, take = self._waiter, self._take
        if waiter is None or waiter.done():
            return
        if not self._messages:  # an earlier reader took them
            self._set_timer()
            return
        if take is None:
            waiter.set_result(None)
            return
        try:
            goes_on = take(self._messages)
        except Exception as error:  # whoever waits raises it
            waiter.set_exception(error)
            return
        if not goes_on:
            waiter.set_result(None)
            return
        self._last_s = asyncio.get_running_loop().time()
        if self._timer is None:
            self._set_timer()
        if self._messages:
            self._is_queued = True
            self._turns.add(self)

    def close(self) -> None:
        """Nobody reads any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._waiter = asyncio.get_running_loop().create_future()
        self._set_timer()
        if self._messages and not self._is_queued:
            self._is_queued = True
            self._turns.add(self)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _due_s(self) -> float:
        """When the wait is over if nothing comes."""
        if self._take is None:
            return self._deadline_s
        return min(self._last_s + self._timeout_s, self._deadline_s)

    def _set_timer(self) -> None:
        """See to it that the timer goes off when the wait is over, or before."""
        due_s = self._due_s()
        if self._timer is not None:
            if self._timer_s <= due_s:
                return
            self._timer.cancel()
        self._timer_s = due_s
        self._timer = asyncio.get_running_loop().call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done() or self._is_queued:
            return
        if asyncio.get_running_loop().time() >= self._due_s() - _CLOCK_SLACK_S:
            waiter.set_exception(TimeoutError())
        else:
            self._set_timer()
