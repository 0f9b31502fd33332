"""Steps that began and are not recorded yet, and what may not be given away until they are.

    begin(step n), begin(step n + 1), conclude(step n), ...    tokens come later
    launch(step n), launch(step n + 1), end(its requests) ...  of a pipeline: in order

Each request counts what steps under way compute and sample for it. Blocks that such a step may
write to go back to the pool when it is over, not before.
"""

from collections import deque
from collections.abc import Sequence

from engine.block_manager import BlockManager
from engine.request import Request, RequestKey
from engine.scheduler_output import ScheduledRequest


class StepsUnderWay:
    """Counts them for one scheduler; owned by its engine loop thread."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager = block_manager
        self._num_begun = 0
        self._num_concluded = 0
        # (number of the last step that may write there, blocks)
        self._held_back: deque[tuple[int, list[int]]] = deque()
        self._resting: set[RequestKey] = set()

    def begin(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """A step starts whose tokens come later; there may be one before it."""
        self._num_begun += 1
        for entry in scheduled:
            entry.request.num_running_tokens += entry.num_tokens
            entry.request.num_running_samples += entry.samples

    def conclude(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """The oldest step that began is over: blocks that it alone held back are free."""
        self._num_concluded += 1
        while self._held_back and self._held_back[0][0] <= self._num_concluded:
            self._block_manager.release_quarantined(self._held_back.popleft()[1])
        for entry in scheduled:
            entry.request.num_running_tokens -= entry.num_tokens
            entry.request.num_running_samples -= entry.samples

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """A step of a pipeline starts: what it computes is there for all that begin after it.

        Requests that sample in it rest until `end`.
        """
        for entry in scheduled:
            if entry.samples:
                self._resting.add(entry.request.key)
            else:
                entry.request.num_computed_tokens += entry.num_tokens
                self._block_manager.register_computed(entry.request)

    def rests(self, request: Request) -> bool:
        """Whether a step of a pipeline is to sample for it, so that no other step may have it."""
        return request.key in self._resting

    def end(self, request: Request) -> None:
        """It rests no more: its token is there, or it left."""
        self._resting.discard(request.key)

    def free_blocks(self, request: Request) -> None:
        """Take the request's blocks; those that a step may write to come back when it is over."""
        if request.num_running_tokens and request.block_ids:
            blocks = self._block_manager.quarantine(request)
            self._held_back.append((self._num_begun, blocks))
        else:
            self._block_manager.free(request)
