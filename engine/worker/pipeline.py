"""Steps of a prefiller whose layers are spread over stages: several are under way at once.

    step n:    stage 0 --> stage 1 --> ... last --states of some rows--> leader: logits, sampling
    step n+1:              stage 0 --> stage 1 ...

The leader computes its part of a step, in stage 0, and goes on with the next one while other stages
compute theirs. It alone decides what a step is, and every rank carries steps out in its order: what
a step finds in the KV cache is what earlier ones wrote, and a rank waits for the stage before it
alone. At most `max_steps_under_way` have begun and not ended; the last stage says when one has.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.batch import BatchBuilder
from engine.layers.attention import OnLayer
from engine.request import Request
from engine.runner import ForwardStats, RunnerOutput, prompt_logprobs, to_sample
from engine.scheduler import Scheduler
from engine.stage_link import Arriving, StageLink
from engine.worker.leading_model import LeadingModel, forward_to_proto
from engine.worker.lockstep import Scheduled
from engine.worker.ranks import Ranks
from engine.worker.step import Emitted, StepRunner
from kernels.kv_cache import KVCache
from kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The last stage has ended a step: an event for the loop."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One that has begun."""

    number: int
    entries: Scheduled
    sampling: Scheduled
    sample_rows: Tensor
    """[R] int32, as in Batch."""
    wanted: Tensor
    """[W] int32: rows whose final states arrive."""
    num_rows: int
    arriving: Arriving | None


class PipelinedModel:
    """Computes steps in two halves; belongs to the leader's loop thread. Counts as StepCounts."""

    def __init__(
        self,
        model: LeadingModel,
        link: StageLink,
        ranks: Ranks,
        k_caches: Sequence[KVCache],
        v_caches: Sequence[KVCache],
        ops: Ops,
        block_size: int,
    ) -> None:
        """ranks: the others; k_caches, v_caches: of the leader's own stage."""
        config = model.parallel.config
        self._model = model
        self._link = link
        self._ranks = ranks
        self._ops = ops
        self._builder = BatchBuilder(k_caches, v_caches, block_size)
        self._max_steps = config.max_steps_under_way
        self._last_stage = config.world_size - config.stage_size
        self._under_way: deque[_Step] = deque()
        self._last_ended = 0
        self.num_steps = 0
        self.num_dummy_steps = [0]
        self._own_busy_s = 0.0
        self.forward_stats = ForwardStats()

    def listen(self, on_ended: Callable[[StepEnded], None]) -> None:
        """Be told, from another thread, that `has_ended` may have changed."""

        def note(number: int) -> None:
            self._last_ended = number
            on_ended(StepEnded())

        self._ranks.listen_steps(self._last_stage, note)

    @property
    def busy_s(self) -> list[float]:
        """By rank: time that it has computed in steps, without waiting for the stage before."""
        return [self._own_busy_s, *self._ranks.busy_s]

    @property
    def has_room(self) -> bool:
        """Whether another step may begin."""
        return len(self._under_way) < self._max_steps

    @property
    def has_ended(self) -> bool:
        """Whether the oldest step under way has ended in every stage."""
        return bool(self._under_way) and self._under_way[0].number <= self._last_ended

    @torch.inference_mode()
    def launch(self, scheduled: Scheduled, on_layer: OnLayer | None = None) -> None:
        """Begin a step, and compute the leader's stage of it; on_layer: see Runner.run."""
        assert scheduled, "nothing is scheduled"
        assert self.has_room, "too many steps are under way"
        self.num_steps += 1
        self.forward_stats.eager["layers in several stages"] += 1
        batch = self._builder.build(scheduled)
        # NOTE: a copy, since the builder writes over its tensors for the next step.
        sample_rows = batch.sample_rows.clone()
        wanted = sample_rows.cpu()
        if any(e.request.sampling.num_prompt_logprobs is not None for e in scheduled):
            wanted = torch.arange(len(batch.input_ids), dtype=torch.int32)
        forward = forward_to_proto(batch.input_ids, batch.positions, batch.kv, wanted)
        number = self._model.start([forward])
        start_s = time.perf_counter()
        rows = self._model.own(batch.input_ids, batch.positions, batch.kv, on_layer)
        self._own_busy_s += time.perf_counter() - start_s
        self._ranks.end_own_step(number)
        self._under_way.append(
            _Step(
                number=number,
                entries=scheduled,
                sampling=[entry for entry in scheduled if entry.samples],
                sample_rows=sample_rows,
                wanted=wanted,
                num_rows=len(batch.input_ids),
                arriving=self._link.expect(len(wanted), rows) if len(wanted) else None,
            )
        )

    @torch.inference_mode()
    def collect(self) -> tuple[Scheduled, RunnerOutput]:
        """What the oldest step, which has ended, computed; the entries that sample of it."""
        step = self._under_way.popleft()
        logits = torch.empty(0, self._model.config.vocab_size)
        if step.arriving is None:
            return step.sampling, RunnerOutput(logits, logits, [])
        arrived = step.arriving.wait()
        hidden = arrived.new_zeros(step.num_rows, arrived.shape[1])
        hidden.index_copy_(0, step.wanted.long().to(arrived.device), arrived)
        if step.sampling:
            rows = hidden.index_select(0, step.sample_rows)
            logits = to_sample(self._ops, step.sampling, self._model.logits(rows))
        logprobs = prompt_logprobs(self._model, step.entries, hidden)
        return step.sampling, RunnerOutput(logits, hidden, logprobs)


class PipelinedSteps:
    """Begins and ends steps, for a prefiller's loop."""

    def __init__(self, model: PipelinedModel, steps: StepRunner, scheduler: Scheduler) -> None:
        self._model = model
        self._steps = steps
        self._scheduler = scheduler

    @property
    def has_room(self) -> bool:
        """Whether another step may begin."""
        return self._model.has_room

    @property
    def busy_s(self) -> list[float]:
        """By rank: see PipelinedModel."""
        return self._model.busy_s

    def listen(self, on_ended: Callable[[StepEnded], None]) -> None:
        """See PipelinedModel."""
        self._model.listen(on_ended)

    def launch(self, scheduled: Scheduled, on_layer: OnLayer) -> None:
        """Begin a step of what was scheduled."""
        self._steps.begin([scheduled])
        self._model.launch(scheduled, on_layer)
        self._scheduler.launch(scheduled)

    def ended(self) -> list[Emitted]:
        """Each request that got its token in a step that has ended meanwhile, with its message."""
        emitted: list[Emitted] = []
        while self._model.has_ended:
            sampling, output = self._model.collect()
            # NOTE: those that were removed meanwhile get no token.
            live = [i for i, entry in enumerate(sampling) if self._is_here(entry.request)]
            if len(live) < len(sampling):
                output = replace(output, logits=output.logits[live])
            parts = [part for part in output.prompt_logprobs if self._is_here(part.request)]
            output = replace(output, prompt_logprobs=parts)
            emitted += self._steps.end([[sampling[i] for i in live]], [output])
        return emitted

    def _is_here(self, request: Request) -> bool:
        return self._scheduler.get(request.key) is request
