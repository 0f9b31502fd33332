"""One step as the scheduler chose it: requests, and how many tokens of each it computes."""

from dataclasses import dataclass, field

from engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request and how many of its tokens the next step computes."""

    request: Request
    num_tokens: int
    """Drafts included."""
    num_drafts: int = 0
    start: int = field(init=False)
    """Index of the first one, steps under way being over by then."""
    samples: bool = field(init=False)
    """Whether the step reaches the last token and samples the next."""
    num_unknown: int = field(init=False)
    """Of the tokens, the last ones that a step under way is still to sample."""

    def __post_init__(self) -> None:
        request = self.request
        start = request.num_computed_tokens + request.num_running_tokens
        object.__setattr__(self, "start", start)
        known = request.num_tokens + request.num_running_samples
        object.__setattr__(self, "samples", self.stop == known)
        object.__setattr__(self, "num_unknown", max(0, self.stop - request.num_tokens))

    @property
    def stop(self) -> int:
        """Index after the last token that the step computes, drafts apart."""
        return self.start + self.num_tokens - self.num_drafts

    @property
    def draft_token_ids(self) -> list[int]:
        """The drafts that the step computes."""
        return self.request.draft_token_ids[: self.num_drafts]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what to run, and which requests lost their blocks to make that possible."""

    scheduled: list[ScheduledRequest]
    preempted: list[Request]
