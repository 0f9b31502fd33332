"""A wait that a signal handler ends."""

import os
import select


class Alarm:
    """One thread waits; handlers of signals ring.

    NOTE: a pipe and no `threading.Event`: a handler that runs while its own thread holds the lock
    of an event would wait for ever.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def ring(self) -> None:
        """End the wait that is under way, or the next one."""
        try:
            os.write(self._writer, b"!")
        except BlockingIOError:
            return  # full: it rings already

    def wait(self, timeout_s: float) -> bool:
        """Wait for a ring, at most so long; whether there was one since the last wait."""
        ready, _, _ = select.select([self._reader], [], [], max(0.0, timeout_s))
        if ready:
            os.read(self._reader, select.PIPE_BUF)
        return bool(ready)
