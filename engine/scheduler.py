"""Which requests compute how many tokens in a step: num_computed_tokens catches up with num_tokens.

    add --> waiting | reserved (holds its blocks) --+
                                                    +--> running --> finished | sending
    add_running --> running, or arrived if no seat -+       |
                        waiting (front) <---- preempted ----+

One idea covers chunked prefill, prefix hits, decode, remote KV, and recomputation when preempted.
A request gets blocks for all its tokens with its seat; only sampled tokens make it grow.

    output = scheduler.schedule()
    token_ids = ...  # run output.scheduled, sample one token for each entry that samples
    scheduler.update(output.scheduled, token_ids)

A step may be scheduled ahead, while the one before it runs and its tokens are unknown:

    begin(step n) ... schedule_ahead() -> step n + 1, begin(it), conclude(step n, its tokens) ...

Owned by one engine loop thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from engine.block_manager import BlockManager
from engine.errors import EngineError
from engine.length_limits import LengthLimits
from engine.request import Request, RequestKey, RequestState
from engine.request_queue import RequestQueue
from engine.scheduler_output import ScheduledRequest, SchedulerOutput
from engine.steps_under_way import StepsUnderWay

_OVER = frozenset({RequestState.FINISHED, RequestState.ABORTED, RequestState.FAILED})


class QueueFull(EngineError):
    """The waiting queue is at its bound: try elsewhere, or later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Bounds of a step and of the queue."""

    max_num_seqs: Annotated[int, Ge(1)] = 64
    """Requests that run at once; at most max_num_batched_tokens, so that each can always decode."""
    max_num_batched_tokens: Annotated[int, Ge(1)] = 2048
    """Tokens of one step."""
    max_prefill_tokens: Annotated[int, Ge(1)] | None = None
    """Of these, tokens of requests that do not decode yet; None: all. Keeps decode steps short."""
    max_num_waiting: Annotated[int, Ge(1)] = 1024
    """Requests that may wait; preempted ones are exempt but counted."""
    max_model_len: Annotated[int, Ge(2)] = 8192
    """Tokens that one request may have, prompt and output."""
    num_draft_tokens: Annotated[int, Ge(0)] = 0
    """Drafts that a request may have in a step, beside its newest token."""
    prefill_only: bool = False
    """A request samples one token and leaves in state SENDING, with its blocks."""

    def __post_init__(self) -> None:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs is {self.max_num_seqs}, "
                f"more than max_num_batched_tokens {self.max_num_batched_tokens}"
            )


class Scheduler:
    """Continuous batching with chunked prefill, priorities and preemption by recomputation."""

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        hold_finished: bool = False,
    ) -> None:
        self.config = config
        self.block_manager = block_manager
        self.num_preemptions = 0
        self.limits = LengthLimits(
            max_model_len=config.max_model_len,
            num_kv_tokens=block_manager.num_blocks * block_manager.block_size,
            num_draft_tokens=config.num_draft_tokens,
            prefill_only=config.prefill_only,
            eos_token_ids=eos_token_ids,
        )
        self._hold_finished = hold_finished or config.prefill_only
        self._requests: dict[RequestKey, Request] = {}
        self._running = RequestQueue()
        self._arrived = RequestQueue()
        self._reserved = RequestQueue()
        self._waiting = RequestQueue()
        self._preempted: set[RequestKey] = set()
        self._under_way = StepsUnderWay(block_manager)
        self._next_order = 0
        self._front_order = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a seat."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a seat."""
        return len(self._arrived) + len(self._reserved) + len(self._waiting)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to compute before their requests decode."""
        left = map(self._num_left, self._requests.values())
        return sum(n for n in left if n > 1)

    @property
    def has_preempted(self) -> bool:
        """Whether preempted requests wait; blocks that others reserve meanwhile delay them."""
        return bool(self._preempted)

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._requests)

    @property
    def requests(self) -> Iterable[Request]:
        """All that are running or waiting here."""
        return self._requests.values()

    def get(self, key: RequestKey) -> Request | None:
        """The request with this key, if it is running or waiting here."""
        return self._requests.get(key)

    def add(self, request: Request) -> None:
        """Queue a request; one that holds the blocks of all its tokens waits for a seat only.

        Raises: QueueFull: max_num_waiting requests wait. ValueError: see LengthLimits; known key.
        """
        self._check_new(request)
        if self.num_waiting >= self.config.max_num_waiting:
            raise QueueFull(
                f"{self.num_waiting} requests wait, the bound is {self.config.max_num_waiting}"
            )
        held = len(request.block_ids) * self.block_manager.block_size
        assert not held or held >= request.num_tokens, f"{request.key} holds only {held} slots"
        request.state = RequestState.WAITING
        self._requests[request.key] = request
        queue = self._reserved if request.block_ids else self._waiting
        queue.push(request, self._take_order())

    def add_running(self, request: Request) -> None:
        """Let a request decode whose blocks hold its KV already.

        If no seat is free it waits for the next one, exempt from max_num_waiting.

        Raises: ValueError: see LengthLimits, or known key.
        """
        self._check_new(request)
        held = len(request.block_ids) * self.block_manager.block_size
        assert request.num_computed_tokens <= held, f"{request.key} lacks blocks for its KV"
        assert request.num_computed_tokens < request.num_tokens, (
            f"{request.key} has no token to run"
        )
        self._requests[request.key] = request
        if len(self._running) < self.config.max_num_seqs:
            self._seat(request)
        else:
            request.state = RequestState.WAITING
            self._arrived.push(request, self._take_order())

    def schedule(self) -> SchedulerOutput:
        """Choose the next step: decoding requests, then prefills under way, then waiting requests.

        When a running request cannot grow, the least urgent one (by priority, then the one seated
        last) is preempted: it loses its blocks and waits before all others of its priority. The
        step may be empty.
        """
        self._seat_arrived()
        preempted = self._grow_running()
        running = [r for r in self._running if not self._under_way.rests(r)]
        # NOTE: not after a preemption, or the victim would take its blocks back at once.
        scheduled = self._choose(running, may_admit=not preempted)
        return SchedulerOutput(scheduled, preempted)

    def schedule_ahead(self) -> list[ScheduledRequest] | None:
        """Choose a step that runs after those under way, whose tokens are unknown; may be empty.

        None: a request can only grow at another's cost, which has to wait until no step runs.
        A request that the steps under way surely end has no part; one that a token may end has.
        """
        self._seat_arrived()
        running = [
            request for request in self._running if not self.limits.ends_with_running(request)
        ]
        for request in running:
            known = request.num_tokens + request.num_running_samples
            if not self.block_manager.allocate(request, known):
                return None
        return self._choose(running, may_admit=True)

    def begin(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """A step starts whose tokens come later, by `conclude`; there may be one before it."""
        self._under_way.begin(scheduled)

    def conclude(
        self, scheduled: Sequence[ScheduledRequest], token_ids: Sequence[int]
    ) -> list[bool]:
        """Record the oldest step that began; `token_ids` as in `update`.

        Whether each entry counts: results for a request that is over by now are dropped.
        """
        self._under_way.conclude(scheduled)
        counts = [self._requests.get(entry.request.key) is entry.request for entry in scheduled]
        self.update(scheduled, token_ids)
        return counts

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Record a step of a pipeline that was begun, without drafts: what comes next is computed
        after it on every rank. Requests that sample rest until `update`, with their entries alone.
        """
        self._under_way.launch(scheduled)

    def update(self, scheduled: Sequence[ScheduledRequest], token_ids: Sequence[int]) -> None:
        """Record a step that ran; `token_ids` has one token per entry that `samples`, in order.

        Requests that end leave with finish_reason and state set; one that was removed since
        `schedule` is skipped.
        """
        sampled = iter(token_ids)
        for entry in scheduled:
            request = entry.request
            token_id = next(sampled) if entry.samples else None
            if self._requests.get(request.key) is not request or request not in self._running:
                continue
            self._under_way.end(request)
            request.num_computed_tokens += entry.num_tokens - entry.num_drafts
            self.block_manager.register_computed(request)
            if token_id is not None:
                self._append(request, token_id)

    def remove(self, request: Request) -> None:
        """Take the request out, wherever it is, and free its blocks; ABORTED unless it is over."""
        self._forget(request)
        self._under_way.free_blocks(request)
        if request.state not in _OVER:
            request.state = RequestState.ABORTED

    def _check_new(self, request: Request) -> None:
        if request.key in self._requests:
            raise ValueError(f"request {request.request_id} attempt {request.attempt} is known")
        self.limits.validate(request)

    def _take_order(self) -> int:
        self._next_order += 1
        return self._next_order

    def _seat(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        self._running.push(request, self._take_order())

    def _forget(self, request: Request) -> None:
        if self._requests.get(request.key) is not request:
            return
        del self._requests[request.key]
        self._preempted.discard(request.key)
        self._under_way.end(request)
        for queue in (self._running, self._arrived, self._reserved, self._waiting):
            if queue.remove(request):
                return

    @staticmethod
    def _num_left(request: Request) -> int:
        left = request.num_tokens - request.num_computed_tokens
        return left + request.num_running_samples - request.num_running_tokens

    def _seat_arrived(self) -> None:
        while self._arrived and len(self._running) < self.config.max_num_seqs:
            request = self._arrived.first()
            self._arrived.remove(request)
            self._seat(request)

    def _choose(self, running: Sequence[Request], *, may_admit: bool) -> list[ScheduledRequest]:
        """A step of requests that hold their blocks, and of new ones if there is room."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        for request in running:
            (decodes if self._num_left(request) == 1 else prefills).append(request)
        scheduled: list[ScheduledRequest] = []
        budget = self.config.max_num_batched_tokens - len(decodes)
        for request in decodes:
            num_drafts = self._admit_drafts(request, budget)
            budget -= num_drafts
            scheduled.append(ScheduledRequest(request, 1 + num_drafts, num_drafts))
        budget = min(budget, self.config.max_prefill_tokens or budget)
        for request in prefills:
            budget -= self._schedule_prefill(request, budget, scheduled)
        while budget > 0 and may_admit and (admitted := self._admit()) is not None:
            budget -= self._schedule_prefill(admitted, budget, scheduled)
        return scheduled

    def _grow_running(self) -> list[Request]:
        """Give every running request, most urgent first, its blocks; return who had to go."""
        preempted = []
        for request in list(self._running):
            while request in self._running and not self.block_manager.allocate(
                request, request.num_tokens
            ):
                victim = self._running.last()
                self._preempt(victim)
                preempted.append(victim)
        return preempted

    def _admit_drafts(self, request: Request, room: int) -> int:
        """How many of the request's drafts the step computes: none that costs others anything."""
        count = min(len(request.draft_token_ids), room, self.limits.num_drafts_allowed(request))
        if count <= 0:
            return 0
        # A drafter that is a model needs slots for drafts after the next ones; they are no must.
        ahead = request.num_tokens + count + self.config.num_draft_tokens
        if self.block_manager.allocate(request, ahead):
            return count
        return count if self.block_manager.allocate(request, request.num_tokens + count) else 0

    def _preempt(self, request: Request) -> None:
        assert not request.num_running_tokens, f"{request.key} is in a step under way"
        request.draft_token_ids = []
        self._running.remove(request)
        self.block_manager.free(request)
        request.num_computed_tokens = 0
        request.state = RequestState.WAITING
        self._front_order -= 1
        self._waiting.push(request, self._front_order)
        self._preempted.add(request.key)
        self.num_preemptions += 1

    def _schedule_prefill(
        self, request: Request, budget: int, scheduled: list[ScheduledRequest]
    ) -> int:
        num_tokens = min(self._num_left(request), budget)
        if num_tokens > 0:
            scheduled.append(ScheduledRequest(request, num_tokens))
        return num_tokens

    def _admit(self) -> Request | None:
        """Seat the next waiting request that fits, with the blocks of all its tokens.

        When the first one does not fit, those behind it wait too, so that a large request is not
        overtaken; but reservations go on, for they hold their blocks and will give them back.
        """
        if len(self._running) >= self.config.max_num_seqs:
            return None
        waiting, reserved = self._waiting.first_place(), self._reserved.first_place()
        if waiting is not None and (reserved is None or waiting < reserved):
            request = self._waiting.first()
            if self._take_blocks(request):
                self._waiting.remove(request)
                self._seat(request)
                return request
        if reserved is not None:
            request = self._reserved.first()
            self._reserved.remove(request)
            self._seat(request)
            return request
        return None

    def _take_blocks(self, request: Request) -> bool:
        # Running requests need blocks soon; without spares the newcomer would lose its own.
        num_spare = 0 if self.config.prefill_only else len(self._running)
        if not self.block_manager.fits(request, request.num_tokens, num_spare):
            return False
        self.block_manager.attach_prefix(request, resumed=request.key in self._preempted)
        self._preempted.discard(request.key)
        allocated = self.block_manager.allocate(request, request.num_tokens)
        assert allocated, f"{request.key} fits, but was not given its blocks"
        return True

    def _append(self, request: Request, token_id: int) -> None:
        request.token_ids.append(token_id)
        request.finish_reason = self.limits.finish_reason(request)
        if self.config.prefill_only:
            request.state = RequestState.SENDING
        elif request.finish_reason is not None:
            request.state = RequestState.FINISHED
        else:
            return
        self._forget(request)
        if not self._hold_finished:
            self._under_way.free_blocks(request)
