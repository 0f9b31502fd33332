"""Runs the model on what the scheduler chose: requests in, logits out. Mutates no request."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.adapters import Adapters
from engine.batch import Batch, BatchBuilder
from engine.config import ModelConfig
from engine.device_draw import can_draw
from engine.layers.attention import OnLayer
from engine.logprobs import TokenLogprobs, top_logprobs
from engine.models import CausalLM
from engine.parallel import Parallel
from engine.request import Request
from engine.scheduler_output import ScheduledRequest
from kernels.device_queue import DeviceQueue
from kernels.kv_cache import KVCache
from kernels.ops import Ops

_LOGPROB_ROWS = 64


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens that one step of one request covers."""

    request: Request
    start: int
    """Index in token_ids of the first token that `entries` is about; at least 1."""
    entries: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """What one step computed."""

    logits: Tensor
    """[R, V] float32, 1 + num_drafts rows per request that samples, in order; on the host, unless
    tokens are drawn on the device.
    """
    hidden: Tensor
    """[T, hidden_size]: what the logits are made of, of every token; valid until the next step."""
    prompt_logprobs: list[PromptLogprobs]
    """For requests that asked for them; a recomputed chunk is reported again."""


@dataclass(frozen=True, slots=True)
class ForwardMemory:
    """What a forward pass may touch, and how much of it: fixed for the life of a worker."""

    k_caches: Sequence[KVCache]
    """As in KVBatch."""
    v_caches: Sequence[KVCache]
    """As in KVBatch."""
    max_num_seqs: int
    """Sequences of a batch."""
    max_blocks: int
    """Blocks of a sequence."""
    parallel: Parallel = field(default_factory=Parallel)
    """The ranks that compute a pass together, and which of them this is."""
    num_draft_tokens: int = 0
    """Drafts of a sequence, at most."""


@dataclass(slots=True)
class ForwardStats:
    """How forward passes were run."""

    num_replays: int = 0
    """By a captured graph."""
    num_recompiles: int = 0
    """Compilations and captures while serving, whoever caused them: stays 0."""
    num_graphs: int = 0
    """That were captured."""
    num_graph_bytes: int = 0
    """Of the host's memory that they take, as far as that is known."""
    capture_s: float = 0.0
    """What capturing or compiling all of them took."""
    eager: Counter[str] = field(default_factory=Counter)
    """By the model's own code, by reason."""


class Forward(Protocol):
    """Runs the model on a batch, by whatever means."""

    @property
    def stats(self) -> ForwardStats:
        """Counted since the start."""
        ...

    def __call__(self, batch: Batch, on_layer: OnLayer | None = None) -> Tensor:
        """-> hidden [T, hidden_size], valid until the next call."""
        ...


class GraphForward(Forward, Protocol):
    """Runs this rank's part of the model, by a graph where whoever calls it says so."""

    def graph_size(self, batches: Sequence[Batch], on_layer: OnLayer | None = None) -> int:
        """Size of the smallest graph that suits all of these; 0: none does, counted by reason."""
        ...

    def replay(self, batch: Batch, size: int) -> Tensor:
        """-> hidden [T, hidden_size], valid until the next call, by the graph of this size."""
        ...


MakeForward = Callable[[CausalLM, Ops, ForwardMemory], GraphForward]
"""Makes what runs the model; called once it is loaded."""


class EagerForward:
    """Calls the model."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self.stats = ForwardStats()

    def graph_size(self, batches: Sequence[Batch], on_layer: OnLayer | None = None) -> int:
        """0."""
        self.stats.eager["graphs are for decoders"] += 1
        return 0

    def replay(self, batch: Batch, size: int) -> Tensor:
        """See `Forward`; never called."""
        raise AssertionError(f"there is no graph of {size}")

    def __call__(self, batch: Batch, on_layer: OnLayer | None = None) -> Tensor:
        """See `Forward`."""
        self.graph_size([batch], on_layer)
        return self._model(batch.input_ids, batch.positions, batch.kv, on_layer)


class Runner:
    """Owns the batch buffers; belongs to one engine loop thread."""

    def __init__(
        self,
        model: CausalLM,
        k_caches: Sequence[KVCache],
        v_caches: Sequence[KVCache],
        ops: Ops,
        block_size: int,
        forward: Forward | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """forward: how to run the model; None calls it. adapters: those of the model, if any."""
        self.ops = ops
        self._model = model
        self._forward: Forward = forward or EagerForward(model)
        self._adapters = adapters
        self._memory = (k_caches, v_caches, block_size)
        self._batches = BatchBuilder(*self._memory)

    @property
    def model_config(self) -> ModelConfig:
        """Of the model that it runs."""
        return self._model.config

    @property
    def forward_stats(self) -> ForwardStats:
        """See `Forward.stats`."""
        return self._forward.stats

    @torch.inference_mode()
    def run(
        self,
        scheduled: Sequence[ScheduledRequest],
        on_layer: Callable[[int], None] | None = None,
    ) -> RunnerOutput:
        """Compute the step; each request holds the blocks for its tokens already.

        `on_layer(i)` is called once per layer, in order, when this step's KV of layer i is in the
        cache; later layers are still to be computed then.
        """
        assert scheduled, "nothing is scheduled"
        batch = self._batches.build(scheduled)
        if self._adapters is not None and batch.has_adapters:
            with self._adapters.batch.set(self._adapters.rows_of(scheduled)):
                hidden = self._forward(batch, on_layer)
        else:
            hidden = self._forward(batch, on_layer)
        if len(batch.sample_rows):
            logits = to_sample(self.ops, scheduled, self._logits(batch, hidden))
        else:
            logits = torch.empty(0, self._model.config.vocab_size)
        return RunnerOutput(logits, hidden, prompt_logprobs(self._model, scheduled, hidden))

    def builder(self, queue: DeviceQueue) -> BatchBuilder:
        """Another builder of batches for `compute`."""
        return BatchBuilder(*self._memory, queue)

    @torch.inference_mode()
    def compute(self, batch: Batch) -> Tensor:
        """The logits of the rows that sample, [R, V] float32, where the model is."""
        hidden = self._forward(batch)
        if not len(batch.sample_rows):
            return hidden.new_empty(0, self._model.config.vocab_size)
        return self._logits(batch, hidden).float()

    def _logits(self, batch: Batch, hidden: Tensor) -> Tensor:
        if len(batch.sample_rows) == len(hidden):
            return self._model.logits(hidden)
        return self._model.logits(hidden.index_select(0, batch.sample_rows))


def to_sample(ops: Ops, scheduled: Sequence[ScheduledRequest], logits: Tensor) -> Tensor:
    """The logits where their tokens are drawn: on the device, if nothing else is made of them.

    NOTE: the next replay of a graph may overwrite them; they are sampled before.
    """
    stays = all(
        can_draw(entry.request, ops) and not entry.num_drafts
        for entry in scheduled
        if entry.samples
    )
    return logits.float() if stays else logits.float().cpu()


def prompt_logprobs(
    model: CausalLM, scheduled: Sequence[ScheduledRequest], hidden: Tensor
) -> list[PromptLogprobs]:
    """Those that the requests of a step ask for, of the tokens that it computes."""
    outputs = []
    first_row = 0
    for entry in scheduled:
        request, k = entry.request, entry.request.sampling.num_prompt_logprobs
        start = entry.start + 1
        stop = min(start + entry.num_tokens, request.num_prompt_tokens)
        if k is not None and start < stop:
            rows = hidden[first_row : first_row + stop - start]
            entries = _token_logprobs(model, rows, request.token_ids[start:stop], k)
            outputs.append(PromptLogprobs(request, start, entries))
        first_row += entry.num_tokens
    return outputs


def _token_logprobs(
    model: CausalLM, hidden: Tensor, token_ids: Sequence[int], k: int
) -> list[TokenLogprobs]:
    """A slice of rows at a time: logits of a whole prompt would take gigabytes."""
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _LOGPROB_ROWS):
        stop = start + _LOGPROB_ROWS
        logits = model.logits(hidden[start:stop]).float().cpu()
        entries += top_logprobs(logits, token_ids[start:stop], k)
    return entries
