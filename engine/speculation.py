"""Speculative decoding: drafts are tokens that may come next; a step computes them beside the
newest token, and keeps the ones that the model itself would have drawn.

    Drafter.propose --> request.draft_token_ids --Scheduler--> computed with the newest token
       ^                                                              |
       +------------ tokens <-- Verifier: sample a row while the draft before it was right

A token is drawn from the model's own logits, with the random number of its own position, exactly as
without drafts; a draft decides only whether the logits after it are at hand. So the tokens of a
request are those of a run without drafts, greedy or sampled, and its seed, its migration and its
logprobs go on as before. The chance that a draft d is right is p(d): this is rejection sampling for
a proposal that is certain of d, where the number that rejects d also draws from what is left.

Source: Leviathan et al. (arXiv 2211.17192); Chen et al. (arXiv 2302.01318).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.grammar import TokenMasks
from engine.layers.attention import OnLayer
from engine.logprobs import TokenLogprobs
from engine.request import Request
from engine.sampling import Sampler
from engine.scheduler import Scheduler
from engine.scheduler_output import ScheduledRequest
from kernels.ops import Ops

Masks = Callable[[Sequence[Request]], TokenMasks | None]
"""The grammars' masks for the next token of the requests."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What one step drew for one request: one token, and one more for each draft that was right."""

    request: Request
    num_drafts: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token, where the request asked for them."""


@dataclass(slots=True)
class DraftCounters:
    """Totals since the start."""

    num_steps: int = 0
    """Times that drafts of a request were computed: each gave 1 + accepted tokens."""
    num_drafts: int = 0
    num_accepted: int = 0

    def add(self, sampled: Sequence[SampledTokens]) -> None:
        """Count what one step drew."""
        for tokens in sampled:
            if tokens.num_drafts:
                self.num_steps += 1
                self.num_drafts += tokens.num_drafts
                self.num_accepted += len(tokens.token_ids) - 1


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Rows of a step's hidden states that belong to tokens which the request kept."""

    request: Request
    start: int
    """Index in token_ids of the first one's token."""
    first_row: int
    num_rows: int


class Drafter(Protocol):
    """Guesses tokens."""

    def propose(
        self, computed: Sequence[ComputedRows], hidden: Tensor, on_layer: OnLayer | None
    ) -> None:
        """Set draft_token_ids of the requests that go on; after `Verifier.run`.

        hidden: [T, hidden_size], the step's. on_layer: for layers that the drafter fills itself.
        """
        ...


class Verifier:
    """Draws the tokens of a step and records them with the scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        ops: Ops,
        masks: Masks | None = None,
    ) -> None:
        """ops: see Sampler."""
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._masks = masks
        # One per place behind the newest token: each keeps what belongs to its own requests.
        self._ops = ops
        self._samplers = [Sampler(vocab_size, eos_token_ids, ops)]

    def run(self, scheduled: Sequence[ScheduledRequest], logits: Tensor) -> list[SampledTokens]:
        """Sample and `Scheduler.update`, for each entry that samples, in order.

        logits: [R, V] float32, 1 + num_drafts rows for each of these entries. Forgets the drafts.
        """
        entries = [entry for entry in scheduled if entry.samples]
        drafts = [entry.draft_token_ids for entry in entries]
        results = [SampledTokens(entry.request, entry.num_drafts) for entry in entries]
        first_rows = [0]
        for entry in entries:
            first_rows.append(first_rows[-1] + 1 + entry.num_drafts)
            entry.request.draft_token_ids = []
        live, place, step = list(range(len(entries))), 0, list(scheduled)
        while True:
            requests = [entries[i].request for i in live]
            if len(live) < len(logits):
                rows = logits[torch.tensor([first_rows[i] + place for i in live])]
            else:
                rows = logits
            masks = self._masks(requests) if self._masks is not None else None
            sampled = self._sampler(place).sample(rows, requests, masks)
            self._scheduler.update(step, sampled.token_ids)
            right = []
            for i, token_id, logprobs in zip(
                live, sampled.token_ids, sampled.logprobs, strict=True
            ):
                results[i].token_ids.append(token_id)
                results[i].logprobs.extend([logprobs] if logprobs else [])
                if drafts[i][place : place + 1] == [token_id] and self._goes_on(entries[i].request):
                    right.append(i)
            if not right:
                return results
            live, place = right, place + 1
            step = [ScheduledRequest(entries[i].request, 1) for i in live]

    def _goes_on(self, request: Request) -> bool:
        return self._scheduler.get(request.key) is request

    def _sampler(self, place: int) -> Sampler:
        if place == len(self._samplers):
            self._samplers.append(Sampler(self._vocab_size, self._eos_token_ids, self._ops))
        return self._samplers[place]


def rows_before(scheduled: Sequence[ScheduledRequest]) -> list[tuple[int, int]]:
    """(first row, first token) of each entry; to be asked before `Verifier.run`."""
    places, row = [], 0
    for entry in scheduled:
        places.append((row, entry.request.num_computed_tokens))
        row += entry.num_tokens
    return places


def rows_kept(
    scheduled: Sequence[ScheduledRequest], before: Sequence[tuple[int, int]]
) -> list[ComputedRows]:
    """The rows of each request that still holds its blocks; to be asked after `Verifier.run`."""
    return [
        ComputedRows(entry.request, start, row, entry.request.num_computed_tokens - start)
        for entry, (row, start) in zip(scheduled, before, strict=True)
        if entry.request.block_ids
    ]
