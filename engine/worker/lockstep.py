"""A step of an engine: one forward pass of all its data-parallel ranks at the same time.

Each of them has requests and a KV cache of its own, but experts are shared, so all take part in
every step. The leader decides on it alone and tells every rank its batch; no rank has to ask
another what it does.

    scheduled, by rank --> a batch each, or one dummy row --> forward, together
      --all-to-all to the leader--> hidden states of the rows that sample --> logits

The vocabulary is projected in the leader's own rank: the states of some rows are far smaller than
their logits, and reading the weight costs the same for few rows as for all.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import Batch, BatchBuilder
from engine.layers.attention import OnLayer
from engine.runner import (
    ForwardStats,
    GraphForward,
    Runner,
    RunnerOutput,
    prompt_logprobs,
    to_sample,
)
from engine.scheduler_output import ScheduledRequest
from engine.worker.leading_model import LeadingModel, forward_to_proto
from kernels.kv_cache import KVCache
from kernels.ops import Ops

Scheduled = Sequence[ScheduledRequest]


class StepCounts(Protocol):
    """What was computed since the start."""

    num_steps: int
    """Forward passes so far."""
    num_dummy_steps: list[int]
    """Of these, by data-parallel rank: those in which it had nothing to compute."""
    forward_stats: ForwardStats


class StepModel(StepCounts, Protocol):
    """Computes what was scheduled."""

    def run(
        self, scheduled: Sequence[Scheduled], on_layer: OnLayer | None = None
    ) -> list[RunnerOutput]:
        """scheduled: by data-parallel rank, not all empty -> what each computed; of a rank without
        work: no rows. on_layer: for the leader's own rank, see Runner.run.
        """
        ...


class SingleStep:
    """Of one data-parallel rank."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.forward_stats = runner.forward_stats
        self.num_steps = 0
        self.num_dummy_steps = [0]

    def run(
        self, scheduled: Sequence[Scheduled], on_layer: OnLayer | None = None
    ) -> list[RunnerOutput]:
        """See StepModel."""
        self.num_steps += 1
        return [self.runner.run(scheduled[0], on_layer)]


class Lockstep:
    """Of several; belongs to the leader's loop thread."""

    def __init__(
        self,
        model: LeadingModel,
        own: GraphForward,
        k_caches: Sequence[KVCache],
        v_caches: Sequence[KVCache],
        ops: Ops,
        block_size: int,
    ) -> None:
        """own: of the leader's part of the model, all ranks having graphs of its sizes; k_caches,
        v_caches: of the leader's own rank.
        """
        self._model = model
        self._own = own
        self._ops = ops
        self._group = model.parallel.dp
        # NOTE: the batches of other ranks are only sent; they have the caches.
        others = [BatchBuilder((), (), block_size) for _ in range(self._group.size - 1)]
        self._builders = [BatchBuilder(k_caches, v_caches, block_size), *others]
        self.num_steps = 0
        self.num_dummy_steps = [0] * self._group.size
        self.forward_stats = own.stats

    @torch.inference_mode()
    def run(
        self, scheduled: Sequence[Scheduled], on_layer: OnLayer | None = None
    ) -> list[RunnerOutput]:
        """See StepModel."""
        assert any(scheduled), "nothing is scheduled"
        self.num_steps += 1
        batches = []
        for dp_rank, (entries, builder) in enumerate(zip(scheduled, self._builders, strict=True)):
            self.num_dummy_steps[dp_rank] += not entries
            batches.append(builder.build(entries) if entries else builder.dummy())
        hidden = self._forward(batches, scheduled, on_layer)
        rows = [
            h.index_select(0, b.sample_rows.to(h.device))
            for h, b in zip(hidden, batches, strict=True)
        ]
        counts = [len(r) for r in rows]
        if any(counts):
            entries = [entry for of_rank in scheduled for entry in of_rank]
            logits = to_sample(self._ops, entries, self._model.logits(torch.cat(rows)))
        else:
            logits = torch.empty(0, self._model.config.vocab_size)
        return [
            RunnerOutput(part, states, prompt_logprobs(self._model, entries, states))
            for part, states, entries in zip(
                torch.split(logits, counts), hidden, scheduled, strict=True
            )
        ]

    def _forward(
        self, batches: Sequence[Batch], scheduled: Sequence[Scheduled], on_layer: OnLayer | None
    ) -> list[Tensor]:
        """Hidden states of every rank's rows, [T, hidden_size]; junk where nobody wants them."""
        wanted = [_wanted_rows(*pair) for pair in zip(batches, scheduled, strict=True)]
        counts = [0, *map(len, wanted[1:])]
        forwards = [
            forward_to_proto(b.input_ids, b.positions, b.kv, rows, gathers=any(counts))
            for b, rows in zip(batches, wanted, strict=True)
        ]
        own, sizes = batches[0], self._graph_sizes(batches, on_layer)
        self._model.start(forwards, sizes)
        if sizes:
            hidden = [self._own.replay(own, sizes[0])]
        else:
            hidden = [self._model.own(own.input_ids, own.positions, own.kv, on_layer)]
        received = hidden[0][:0]
        if any(counts):
            received = self._group.all_to_all(received, [0] * len(counts), counts)
        for batch, rows, part in zip(
            batches[1:], wanted[1:], torch.split(received, counts)[1:], strict=True
        ):
            states = part.new_zeros(len(batch.input_ids), part.shape[1])
            states.index_copy_(0, rows.long().to(part.device), part)
            hidden.append(states)
        return hidden

    def _graph_sizes(self, batches: Sequence[Batch], on_layer: OnLayer | None) -> list[int]:
        """By data-parallel rank; empty: the model's own code."""
        size = self._own.graph_size(batches, on_layer)
        if not size:
            return []
        if self._model.parallel.config.ep_size > 1:
            return [size] * len(batches)  # they meet in every sparse layer
        return [self._own.graph_size([batch]) for batch in batches]


def _wanted_rows(batch: Batch, scheduled: Scheduled) -> Tensor:
    """Rows whose hidden states the leader gets: [R] int32."""
    if any(entry.request.sampling.num_prompt_logprobs is not None for entry in scheduled):
        return torch.arange(len(batch.input_ids), dtype=torch.int32)
    if scheduled and not len(batch.sample_rows):
        # NOTE: the leader has to wait until this rank's KV is written: whoever gets its blocks next
        # may fill them from elsewhere at once.
        return torch.zeros(1, dtype=torch.int32)
    return batch.sample_rows.cpu()
