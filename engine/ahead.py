"""Steps that are scheduled, built and launched while the one before them runs.

    host:    build 2, launch | wait for 1, emit | build 3, launch | wait for 2, emit | ...
    device:        1                  2                    3
    tokens:  1 writes them --------> 2 reads them, and writes its own -------> ...

The token that a step feeds on stays on the device; the host sees it one step later. Everything else
about a step, lengths, positions, slots and random numbers, is known before that token is. What a
token may end, a request at its end of sequence, is found one step late: a row too many was
computed, and its result is dropped.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.batch import Batch
from engine.block_table import GrowableArray
from engine.device_draw import can_draw
from engine.logprobs import TokenLogprobs
from engine.penalties import is_penalised
from engine.request import Request
from engine.runner import Runner
from engine.sampling import Draws, Sampler
from engine.scheduler import Scheduler
from engine.scheduler_output import ScheduledRequest
from engine.speculation import SampledTokens
from kernels.device_queue import DeviceQueue, Pending
from kernels.ops import Ops


@dataclass(slots=True)
class AheadStats:
    """How steps were run, since the start."""

    num_ahead: int = 0
    """Launched before the one before them was over."""
    num_discarded: int = 0
    """Tokens that were computed for a request which had ended."""
    waits: Counter[str] = field(default_factory=Counter)
    """Steps that were not launched ahead although another ran, by reason."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    token_ids: Tensor
    """[R] on the host, once the work is done."""
    logprobs: list[TokenLogprobs | None]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    scheduled: Sequence[ScheduledRequest]
    rows: dict[int, int]
    """Row in which a request samples, by its id()."""
    drawn: Pending[_Drawn]


class AheadSteps:
    """Launches steps, one of them while another runs; belongs to the engine's loop thread."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        queue: DeviceQueue,
        stats: AheadStats | None = None,
    ) -> None:
        """The queue is closed with this. stats: where to count."""
        self.stats = AheadStats() if stats is None else stats
        self._runner = runner
        self._scheduler = scheduler
        self._queue = queue
        # NOTE: two, in turn: a step still reads its batch while the next one is built.
        self._builders = deque([runner.builder(queue), runner.builder(queue)])
        self._source_rows = deque(GrowableArray(512, queue.host_ints) for _ in range(2))
        config = runner.model_config
        self._sampler = Sampler(config.vocab_size, config.eos_token_ids, runner.ops)
        self._tokens = torch.zeros(
            scheduler.config.max_num_seqs, dtype=torch.int32, device=runner.ops.device
        )
        self._under_way: deque[_UnderWay] = deque()

    @property
    def num_under_way(self) -> int:
        """Steps that were launched and not concluded: at most two."""
        return len(self._under_way)

    def why_wait(self) -> str:
        """Why the next step needs the tokens of the one under way on the host; empty: it does not.

        One request that does holds up those beside it: they are in one batch.
        """
        for request in self._scheduler.requests:
            if reason := _why_wait(request, self._runner.ops):
                return reason
        return ""

    def launch(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Start a step, behind the one under way; does not wait for either."""
        previous = self._under_way[-1] if self._under_way else None
        self._builders.rotate()
        self._source_rows.rotate()
        batch = self._builders[0].build(scheduled)
        sampling = [entry for entry in scheduled if entry.samples]
        draws = self._sampler.prepare(
            [entry.request for entry in sampling],
            [entry.stop for entry in sampling],
            self._runner.ops.device,
        )
        draws.upload(self._queue.to_device)
        sources = None if previous is None else self._sources(scheduled, previous.rows)
        self._scheduler.begin(scheduled)
        self.stats.num_ahead += previous is not None
        drawn = self._queue.submit(lambda: self._run(batch, sources, draws))
        rows = {id(entry.request): row for row, entry in enumerate(sampling)}
        self._under_way.append(_UnderWay(scheduled, rows, drawn))

    def conclude(self) -> list[SampledTokens]:
        """Wait for the oldest step under way and record it; the tokens of requests that go on, or
        end with them.
        """
        step = self._under_way.popleft()
        drawn = step.drawn.result()
        token_ids = drawn.token_ids.tolist()
        counts = self._scheduler.conclude(step.scheduled, token_ids)
        sampling = [pair for pair in zip(step.scheduled, counts, strict=True) if pair[0].samples]
        sampled = []
        for (entry, is_live), token_id, logprobs in zip(
            sampling, token_ids, drawn.logprobs, strict=True
        ):
            if is_live:
                kept = [logprobs] if logprobs is not None else []
                sampled.append(SampledTokens(entry.request, 0, [token_id], kept))
        self.stats.num_discarded += len(sampling) - len(sampled)
        return sampled

    def close(self) -> None:
        """Wait until the device is done, and let go of it."""
        self._queue.close()

    def _sources(
        self, scheduled: Sequence[ScheduledRequest], rows: dict[int, int]
    ) -> Tensor | None:
        """[T] on the device: the row of the step before whose token each token is, -1 for those
        that are known; None: all are.
        """
        if not any(entry.num_unknown for entry in scheduled):
            return None
        sources: list[int] = []
        for entry in scheduled:
            sources += [-1] * entry.num_tokens
            if entry.num_unknown:
                sources[-1] = rows[id(entry.request)]
        buffer = self._source_rows[0]
        buffer.take(len(sources))[:] = sources
        return self._queue.to_device(buffer.tensor(len(sources)))

    @torch.inference_mode()
    def _run(self, batch: Batch, sources: Tensor | None, draws: Draws) -> _Drawn:
        """On the device's thread, or launched to it."""
        if sources is not None:
            unknown = self._tokens[sources.clamp(min=0).long()]
            input_ids = torch.where(sources < 0, batch.input_ids, unknown)
            batch = replace(batch, input_ids=input_ids)
        logits = self._runner.compute(batch)
        if not len(logits):
            return _Drawn(torch.empty(0, dtype=torch.int64), [])
        token_ids = draws.choose(logits)
        self._tokens[: len(token_ids)] = token_ids
        host = self._queue.to_host(token_ids)
        if draws.wants_logprobs:
            return _Drawn(host, draws.logprobs(logits, host.tolist()))
        return _Drawn(host, [None] * len(host))


def _why_wait(request: Request, ops: Ops) -> str:
    sampling = request.sampling
    if sampling.grammar:
        return "grammar"
    if is_penalised(request):
        return "penalties"
    if request.adapter:
        return "adapters"
    done = request.num_computed_tokens + request.num_running_tokens
    if sampling.num_prompt_logprobs is not None and done < request.num_prompt_tokens:
        return "prompt logprobs"
    if ops.samples_on_device and not can_draw(request, ops):
        return "drawn on the host"
    return ""
