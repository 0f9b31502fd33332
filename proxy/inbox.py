"""Messages for one attempt, and when its reader is woken.

One step of a worker has tokens for all of its requests. To wake every reader at once would keep
the event loop busy until the last of them is done, and the worker's next step unread. So readers
are woken a few per turn of the loop, first come first served; one that waits for its turn finds
all that came meanwhile, and sends it as one.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")

_NUM_WOKEN_PER_TURN = 32
# Timers of the loop may run this much early.
_CLOCK_SLACK_S = 0.002


class WakeQueue:
    """Wakes readers in order, without keeping the event loop from everything else."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    def add(self, reader: "asyncio.Future[None]") -> None:
        """Wake a reader when its turn comes."""
        self._waiting.append(reader)
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        for _ in range(min(_NUM_WOKEN_PER_TURN, len(self._waiting))):
            reader = self._waiting.popleft()
            if not reader.done():
                reader.set_result(None)
        self._is_scheduled = bool(self._waiting)
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._wake_some)


class Inbox(Generic[MessageT]):
    """Messages in order of arrival, for one reader at a time; `close` it at the end.

    Bounded by the attempt itself: a worker sends at most max_tokens outputs.
    """

    def __init__(self, wakes: WakeQueue) -> None:
        self._wakes = wakes
        self._messages: deque[MessageT] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._is_woken = False
        self._deadline_s = 0.0
        # NOTE: a timer for every message would show at one message per token. There is one, which
        # looks at the deadline when it goes off.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    def put(self, message: MessageT) -> None:
        """Add a message and have the reader woken."""
        self._messages.append(message)
        if self._reader is not None and not self._is_woken:
            self._is_woken = True
            self._wakes.add(self._reader)

    async def get(self, deadline_s: float) -> MessageT:
        """Take the oldest message.

        Raises: TimeoutError: when the loop's clock passes `deadline_s` first.
        """
        if not self._messages:
            loop = asyncio.get_running_loop()
            self._reader = loop.create_future()
            self._is_woken = False
            self._deadline_s = deadline_s
            if self._timer is None or self._timer_s > deadline_s:
                self._set_timer(deadline_s)
            try:
                await self._reader
            finally:
                self._reader = None
        return self._messages.popleft()

    def take_if(self, is_wanted: Callable[[MessageT], bool]) -> MessageT | None:
        """Take the oldest message if there is one, and it is wanted."""
        if self._messages and is_wanted(self._messages[0]):
            return self._messages.popleft()
        return None

    def close(self) -> None:
        """Nobody reads any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = at_s
        self._timer = asyncio.get_running_loop().call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        reader = self._reader
        if reader is None or reader.done() or self._is_woken:
            return
        if asyncio.get_running_loop().time() >= self._deadline_s - _CLOCK_SLACK_S:
            reader.set_exception(TimeoutError())
        else:
            self._set_timer(self._deadline_s)
