"""Drafts without a model: what followed the last time that the request's last tokens occurred.

Source: prompt lookup decoding, as in LLMA (arXiv 2304.04487).
"""

from array import array
from collections.abc import Sequence

from torch import Tensor

from engine.layers.attention import OnLayer
from engine.scheduler import Scheduler
from engine.speculation import ComputedRows

_LONGEST = 4
_SHORTEST = 2


class NgramDrafter:
    """Implements `engine.speculation.Drafter`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def propose(
        self, computed: Sequence[ComputedRows], hidden: Tensor, on_layer: OnLayer | None
    ) -> None:
        """See `Drafter.propose`; needs no hidden states."""
        for rows in computed:
            request = rows.request
            if count := self._scheduler.limits.num_drafts_allowed(request):
                request.draft_token_ids = find_continuation(request.token_ids, count)


def find_continuation(token_ids: Sequence[int], count: int) -> list[int]:
    """Up to `count` tokens after the latest earlier place of the longest n-gram at the end."""
    history = array("i", token_ids)
    text, item = history.tobytes(), history.itemsize
    for n in range(min(_LONGEST, len(token_ids) - 1), _SHORTEST - 1, -1):
        suffix = text[-n * item :]
        end = len(text) - item
        while (at := text.rfind(suffix, 0, end)) >= 0:
            if at % item == 0:
                first = at // item + n
                return list(token_ids[first : first + count])
            end = at + len(suffix) - 1
    return []
