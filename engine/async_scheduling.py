"""What an engine loop does next where steps run ahead: one policy for every loop.

nothing under way:  schedule, and launch; or run at once if its tokens need the host
a step under way:   schedule ahead, and launch; then wait for the older step and report it
                    the next step needs its tokens, or its blocks: wait for it alone
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from engine.ahead import AheadSteps
from engine.scheduler_output import ScheduledRequest

R = TypeVar("R")


class Steps(Protocol[R]):
    """Carries out steps, and says what came out of them."""

    def run_one(self, scheduled: Sequence[ScheduledRequest]) -> list[R]:
        """A whole step, while none is under way."""
        ...

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """See `AheadSteps.launch`."""
        ...

    def conclude(self) -> list[R]:
        """See `AheadSteps.conclude`."""
        ...


class AsyncScheduling(Generic[R]):
    """See the module's docstring; belongs to the loop's thread."""

    def __init__(
        self,
        ahead: AheadSteps,
        steps: Steps[R],
        schedule: Callable[[], list[ScheduledRequest]],
        schedule_ahead: Callable[[], list[ScheduledRequest] | None],
    ) -> None:
        """schedule, schedule_ahead: as `Scheduler` has them."""
        self._ahead = ahead
        self._steps = steps
        self._schedule = schedule
        self._schedule_ahead = schedule_ahead

    def step(self) -> list[R] | None:
        """Results of a step, perhaps of none yet; None: there is nothing to do."""
        reason = self._ahead.why_wait()
        if self._ahead.num_under_way:
            return self._behind(reason)
        scheduled = self._schedule()
        if not scheduled:
            return None
        if not reason:
            self._steps.launch(scheduled)
            return []
        self._ahead.stats.waits[reason] += 1
        return self._steps.run_one(scheduled)

    def _behind(self, reason: str) -> list[R]:
        if not reason:
            scheduled = self._schedule_ahead()
            if scheduled:
                self._steps.launch(scheduled)
            elif scheduled is None:
                self._ahead.stats.waits["blocks ran out"] += 1
        return self._steps.conclude()
