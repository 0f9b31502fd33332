"""Bounds what is with the workers at a time: a permit per sequence, first come first served."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from proxy.config import ProxyConfig
from proxy.errors import Overloaded


@dataclass(slots=True, eq=False)
class _Waiter:
    num_permits: int
    admitted: "asyncio.Future[None]"


class Admission:
    """A counting gate with a bounded queue."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._num_free = config.max_concurrent_requests
        self._queue: deque[_Waiter] = deque()
        self.num_admitted = 0
        """Requests inside."""

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @asynccontextmanager
    async def admit(self, num_sequences: int) -> AsyncIterator[None]:
        """Hold permits for one request; a request larger than the gate takes all of it.

        Raises: Overloaded: when the queue is full or the wait lasted queue_timeout_s.
        """
        num_permits = min(num_sequences, self._config.max_concurrent_requests)
        await self._acquire(num_permits)
        self.num_admitted += 1
        try:
            yield
        finally:
            self.num_admitted -= 1
            self._release(num_permits)

    async def _acquire(self, num_permits: int) -> None:
        if not self._queue and self._num_free >= num_permits:
            self._num_free -= num_permits
            return
        if len(self._queue) >= self._config.max_queued_requests:
            raise Overloaded(
                f"{len(self._queue)} requests wait already, the limit is "
                f"{self._config.max_queued_requests}",
                retry_after_s=1.0,
            )
        waiter = _Waiter(num_permits, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        try:
            async with asyncio.timeout(self._config.queue_timeout_s):
                await waiter.admitted
        except BaseException as error:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                self._release(num_permits)
            elif waiter in self._queue:
                self._queue.remove(waiter)
                self._admit_waiting()
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"no capacity within {self._config.queue_timeout_s:g} s", retry_after_s=1.0
                ) from None
            raise

    def _release(self, num_permits: int) -> None:
        self._num_free += num_permits
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._queue and self._queue[0].num_permits <= self._num_free:
            waiter = self._queue.popleft()
            if waiter.admitted.cancelled():
                continue
            self._num_free -= waiter.num_permits
            waiter.admitted.set_result(None)
