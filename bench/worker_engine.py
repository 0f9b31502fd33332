"""A worker's engine without its network, and what this machine could do at best.

A step is what a decoder does for it: schedule, build the batch, run the model, sample, account, and
serialise one message. Requests here share nothing with one another or with earlier ones.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoder.graph import graph_forward
from engine.async_scheduling import AsyncScheduling
from engine.batch import Batch
from engine.config import ModelConfig
from engine.layers.attention import OnLayer
from engine.models import CausalLM
from engine.request import Request, SamplingParams
from engine.runner import ForwardMemory, GraphForward, MakeForward
from engine.weights import load_model_config
from engine.worker.assembly import Engine, build_engine
from engine.worker.config import WorkerConfig
from engine.worker.local_ranks import LocalLauncher
from engine.worker.process import Start
from engine.worker.server import ServerThread
from engine.worker.step import group_by_session
from kernels.ops import Ops
from pdserve.models import resolve_model
from protos import worker_pb2

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.7, top_k=50, top_p=0.9)
"""As chats are: every logit is looked at."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What it does at best, as measured a moment ago."""

    bytes_per_s: float
    """Of a read-only sum."""
    operations_per_s: float
    """Of a float32 matrix product."""

    @classmethod
    def measure(cls) -> "Machine":
        """Take both, with torch's number of threads; a tenth of a second each."""
        numbers, square = torch.ones(64 << 20), torch.ones(1536, 1536)
        reading, multiplying = (
            min(duration_s(f) for _ in range(5)) for f in (numbers.sum, lambda: square @ square)
        )
        return cls(numbers.nbytes / reading, 2 * 1536**3 / multiplying)

    def floor_s(self, num_bytes: float, num_operations: float) -> float:
        """No less is possible when both overlap perfectly."""
        return max(num_bytes / self.bytes_per_s, num_operations / self.operations_per_s)


def duration_s(function: Callable[[], object]) -> float:
    """How long a call takes."""
    started_s = time.perf_counter()
    function()
    return time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class Cost:
    """What a model's steps read and compute."""

    config: ModelConfig
    bytes_per_weight: float

    def decode(self, batch: int, context: int) -> tuple[float, float]:
        """(bytes, operations) of a step: of its weights, and of keys and values."""
        num_bytes, num_operations = self.decode_weights(batch)
        num_operations += batch * self._attention(context)
        return num_bytes + self.kv_bytes(batch, context), num_operations

    def decode_weights(self, batch: int) -> tuple[float, float]:
        """(bytes, operations) of a step without attention."""
        weights = self._layer_weights() + self._head_weights()
        return self.bytes_per_weight * weights, 2 * batch * weights

    def kv_bytes(self, batch: int, context: int) -> int:
        """Keys and values that a step reads."""
        return batch * context * self._kv_bytes_per_token()

    def prefill(self, tokens: int) -> tuple[float, float]:
        """(bytes, operations) of a whole prompt, the projection to the vocabulary once."""
        attention = sum(self._attention(context) for context in range(1, tokens + 1))
        linear = 2 * tokens * self._layer_weights() + 2 * self._head_weights()
        return self.bytes_per_weight * self._layer_weights(), linear + attention

    def _layer_weights(self) -> int:
        c = self.config
        attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
        return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)

    def _head_weights(self) -> int:
        return self.config.hidden_size * self.config.vocab_size

    def _kv_bytes_per_token(self) -> int:
        return 4 * 2 * self.config.num_layers * self.config.num_kv_heads * self.config.head_dim

    def _attention(self, context: int) -> int:
        return 4 * context * self.config.num_layers * self.config.num_heads * self.config.head_dim


class _Stopwatch:
    """Sums up the time inside the model."""

    def __init__(self) -> None:
        self.total_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self.total_s += time.perf_counter() - started_s


class _TimedForward:
    """A GraphForward that is timed."""

    def __init__(self, forward: GraphForward, model: CausalLM, watch: _Stopwatch) -> None:
        self._forward = forward
        self._watch = watch
        logits = model.logits

        def timed_logits(hidden: Tensor) -> Tensor:
            with watch.running():
                return logits(hidden)

        vars(model)["logits"] = timed_logits
        self.stats = forward.stats

    def graph_size(self, batches: Sequence[Batch], on_layer: OnLayer | None = None) -> int:
        return self._forward.graph_size(batches, on_layer)

    def replay(self, batch: Batch, size: int) -> Tensor:
        with self._watch.running():
            return self._forward.replay(batch, size)

    def __call__(self, batch: Batch, on_layer: OnLayer | None = None) -> Tensor:
        with self._watch.running():
            return self._forward(batch, on_layer)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Medians over the steps of one load."""

    step_s: float
    other_s: float
    """Of it, not in the model."""


class BenchEngine:
    """An engine as a decoder builds it, colocated: it prefills too."""

    def __init__(
        self,
        model: str | Path,
        threads: int,
        make_forward: MakeForward | None = None,
        **options: Any,
    ) -> None:
        """model: a name, or files that need nothing but weights and a configuration.

        make_forward: how to run the model; None: by `graph_mode`. options: of WorkerConfig.
        """
        torch.set_num_threads(threads)
        path = model if isinstance(model, Path) else resolve_model(model)
        self.config = load_model_config(path)
        self._watch = _Stopwatch()
        settings = {"kv_cache_bytes": 3 << 30, "max_num_batched_tokens": 1024, "max_num_seqs": 64}
        config = WorkerConfig(
            engine_id="bench", model_path=str(path), model_name=str(model), **(settings | options)
        )
        make = make_forward or graph_forward(config, _ignore)

        def make_timed(model: CausalLM, ops: Ops, memory: ForwardMemory) -> GraphForward:
            return _TimedForward(make(model, ops, memory), model, self._watch)

        start = Start(
            config=config,
            incarnation=1,
            server=ServerThread("bench"),
            address="",
            report=_ignore,
            launcher=LocalLauncher(),
            on_lost=lambda why: None,
        )
        self.load_s = duration_s(lambda: self._build(start, make_timed))
        self._numbers = random.Random(1)

    def _build(self, start: Start, make_forward: MakeForward) -> None:
        self.engine: Engine = build_engine(start, worker_pb2.ROLE_DECODER, "memory", make_forward)

    def requests(
        self, count: int, num_tokens: int, max_tokens: int, sampling: SamplingParams = GREEDY
    ) -> list[Request]:
        """Random prompts; sampling: of each, but for its length and its seed."""
        return [
            Request(
                request_id=f"{self._numbers.getrandbits(64):x}",
                attempt=0,
                token_ids=[self._numbers.randrange(100, 20_000) for _ in range(num_tokens)],
                num_prompt_tokens=num_tokens,
                sampling=replace(
                    sampling,
                    max_tokens=max_tokens,
                    ignore_eos=True,
                    seed=self._numbers.getrandbits(64),
                ),
            )
            for _ in range(count)
        ]

    def run(self) -> Iterator[tuple[int, float, float]]:
        """(tokens computed, seconds, of these not in the model) of each step until all is done."""
        while self.engine.pools[0].scheduler.has_work:
            model_s = self._watch.total_s
            started_s = time.perf_counter()
            scheduled = self.engine.pools[0].scheduler.schedule().scheduled
            emitted = self.engine.steps.run([scheduled])
            for _, message in group_by_session(emitted, lambda key: 1):
                message.SerializeToString()
            step_s = time.perf_counter() - started_s
            num_tokens = sum(entry.num_tokens for entry in scheduled)
            yield num_tokens, step_s, step_s - (self._watch.total_s - model_s)

    def run_ahead(self) -> Iterator[tuple[int, float, float]]:
        """The same where each step is launched while the one before it runs; with the engine's
        option async_scheduling.
        """
        steps, scheduler = self.engine.steps, self.engine.pools[0].scheduler
        ahead = steps.ahead
        assert ahead is not None, "async_scheduling is off"
        async_scheduling = AsyncScheduling(
            ahead, steps, lambda: scheduler.schedule().scheduled, scheduler.schedule_ahead
        )
        model_s, started_s = self._watch.total_s, time.perf_counter()
        while scheduler.has_work or ahead.num_under_way:
            emitted = async_scheduling.step()
            for _, message in group_by_session(emitted or [], lambda key: 1):
                message.SerializeToString()
            if emitted:
                step_s = time.perf_counter() - started_s
                yield len(emitted), step_s, step_s - (self._watch.total_s - model_s)
                model_s, started_s = self._watch.total_s, time.perf_counter()

    def decode(
        self,
        batch: int,
        context: int,
        num_steps: int = 24,
        *,
        sampling: SamplingParams = GREEDY,
        is_ahead: bool = False,
    ) -> StepTimes:
        """Steps in which `batch` requests decode with about `context` keys each.

        is_ahead: see `run_ahead`; what is not the model then overlaps with it, down to below zero.
        Their prompts are not computed: what the cache holds makes no difference to the time.
        """
        for request in self.requests(batch, context - num_steps // 2, num_steps, sampling):
            blocks = self.engine.pools[0].blocks
            assert blocks.allocate(request, request.num_tokens), "the cache is full"
            request.num_computed_tokens = request.num_tokens - 1
            self.engine.pools[0].scheduler.add_running(request)
        steps = list(self.run_ahead() if is_ahead else self.run())
        assert all(num_tokens == batch for num_tokens, _, _ in steps), "not all steps are decodes"
        return StepTimes(*(statistics.median(step[i] for step in steps) for i in (1, 2)))

    def prefill_s(self, tokens: int) -> float:
        """Time until the first token of a prompt that nobody shares."""
        for request in self.requests(1, tokens, 1):
            self.engine.pools[0].scheduler.add(request)
        return sum(step_s for _, step_s, _ in self.run())


def _ignore(phase: str, progress: float) -> None:
    pass


def default_output(name: str) -> Path:
    """Where a benchmark leaves its figures."""
    return Path("build") / name
