"""Graph-mode decode: the forward pass of a decode batch, captured once per size and replayed.

    batch of N rows --smallest size >= N--> copied into static buffers, padded --> replay
                  \\-- nothing fits --> eager, counted by reason

A row is a token: a sequence has one, and one more for each draft. Where the backend takes drafts, a
graph of N rows serves any sequences of so many together; see decoder.static_batch.

A backend turns a forward pass over static tensors into something that can be run again; it knows
nothing of requests. Everything is captured before a worker serves, nothing afterwards.

Ranks that compute a pass together have graphs of the same sizes, captured in the same order. What
one of them cannot capture, none replays. Which graph they replay, the leader says step by step.
"""

import importlib
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from decoder.native_graph import NativeBackend
from decoder.static_batch import StaticBatch
from engine.batch import Batch, KVBatch
from engine.collectives import first_problem
from engine.layers.attention import OnLayer
from engine.models import CausalLM
from engine.parallel import Parallel
from engine.runner import ForwardMemory, ForwardStats, MakeForward
from engine.step_plan import StepPlan, plan_step
from engine.worker.config import WorkerConfig
from kernels.graph import CaptureError
from kernels.ops import Ops

GRAPH_MODES = ("auto", "eager", "native", "torchair", "aclgraph")

_AUTO = {"cpu": "native", "npu": "torchair"}

_log = logging.getLogger(__name__)

ForwardFn = Callable[[Tensor, Tensor, KVBatch], Tensor]
"""(input_ids, positions, kv) -> hidden [T, hidden_size]."""

Report = Callable[[str, float], None]


class GraphBackend(Protocol):
    """Captures and replays; one per worker, used by its engine thread only."""

    @property
    def name(self) -> str:
        """As in the configuration."""
        ...

    @property
    def has_host_lengths(self) -> bool:
        """Whether cu_seqlens_q and context_lens of a captured batch are read on the host."""
        ...

    @property
    def takes_drafts(self) -> bool:
        """Whether the rows of a captured batch may be dealt out to sequences in any way."""
        ...

    @property
    def num_compiles(self) -> int:
        """Compilations and captures so far, whoever caused them; one while serving is a mistake,
        and shows.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Of the host's memory that all graphs together take; 0: nobody knows."""
        ...

    def batch_sizes(self, max_num_rows: int) -> Sequence[int]:
        """Sizes that are worth a graph each, ascending; batches between two are padded."""
        ...

    def capture(
        self, forward: ForwardFn, batch: Batch, agree: Callable[[], None]
    ) -> Callable[[], Tensor]:
        """Capture forward(batch.input_ids, batch.positions, batch.kv) on these very tensors.

        The result computes it anew from what the tensors, the KV caches included, hold by then. Its
        output may be overwritten by the next replay of any graph. Larger sizes are captured first.

        agree: called once, when nothing can fail any more that does not fail on every rank, and
        before the graph is run, which takes all ranks. It waits for them.

        Raises: CaptureError: the model does something that cannot be replayed, here or, from agree,
        on another rank; says what.
        """
        ...


def select_backend(
    mode: str,
    ops: Ops,
    model: CausalLM,
    *,
    cache_key: str = "",
    parallel: Parallel | None = None,
) -> GraphBackend | None:
    """The backend for a graph_mode; None for eager. `auto` takes what suits the ops.

    cache_key: of graphs that are kept on disk; see `WorkerConfig.graph_key`.
    parallel: the model's. Sizes are multiples of tp_size where rows may be scattered over it.

    Raises: ValueError: the mode is unknown, or not for these ops.
    """
    if mode not in GRAPH_MODES:
        raise ValueError(f"graph_mode {mode!r} is not one of {', '.join(GRAPH_MODES)}")
    if mode == "auto":
        mode = _AUTO.get(ops.name, "eager")
    if mode == "eager":
        return None
    wanted = "cpu" if mode == "native" else "npu"
    if ops.name != wanted:
        raise ValueError(f"graph_mode {mode} needs the {wanted} kernels, the backend is {ops.name}")
    parallel = parallel or Parallel()
    tp_size = parallel.config.tp_size
    if mode == "native":
        is_scattered = parallel.config.sequence_parallel
        return NativeBackend(parallel.tape, multiple_of=tp_size if is_scattered else 1)
    # NOTE: imported here because torch_npu exists on Ascend hosts alone.
    module = importlib.import_module("decoder.graph_npu")
    if mode == "torchair":
        compiled: GraphBackend = module.TorchairBackend(
            model, parallel=parallel, cache_key=cache_key
        )
        return compiled
    captured: GraphBackend = module.AclGraphBackend(ops, parallel=parallel)
    return captured


class GraphRunner:
    """The forward pass of a decoder; see `engine.runner.Forward`."""

    def __init__(
        self, model: CausalLM, memory: ForwardMemory, backend: GraphBackend | None
    ) -> None:
        """Captures nothing yet; until `capture` is called, everything runs eagerly."""
        self._model = model
        self._backend = backend
        self._takes_drafts = backend is not None and backend.takes_drafts
        most = memory.max_num_seqs * (1 + memory.num_draft_tokens * self._takes_drafts)
        self._sizes = tuple(backend.batch_sizes(most)) if backend else ()
        self._static = StaticBatch(
            memory,
            max(self._sizes, default=0),
            has_host_lengths=backend is not None and backend.has_host_lengths,
            is_ragged=self._takes_drafts,
        )
        self._graphs: dict[int, Callable[[], Tensor]] = {}
        self._parallel = memory.parallel
        self._plans: dict[int, StepPlan] = {}
        self._num_compiles_at_start = 0
        self._why_not = "nothing is captured" if backend else "graph_mode is eager"
        self.stats = ForwardStats()

    @torch.inference_mode()
    def capture(self, report: Report) -> None:
        """Capture every size, with all ranks; what cannot be captured, here or on another one, is
        said, and everything stays eager.

        Raises: RuntimeError: a rank is gone.
        """
        if self._backend is None:
            return
        if reason := _changes_while_serving(self._parallel):
            self._stay_eager(reason)
            return
        started_s = time.monotonic()
        for done, size in enumerate(reversed(self._sizes)):
            report("capturing graphs", done / len(self._sizes))
            if problem := self._capture(self._backend, size):
                self._stay_eager(f"{self._backend.name} graphs: {problem}")
                break
        else:
            self._why_not = ""
            self.stats.capture_s = time.monotonic() - started_s
            self._say_what_is_there(self._backend)
        self._num_compiles_at_start = self._backend.num_compiles

    def _say_what_is_there(self, backend: GraphBackend) -> None:
        self.stats.num_graphs = len(self._graphs)
        self.stats.num_graph_bytes = backend.num_bytes
        _log.info(
            "%d %s graphs of up to %d rows, made in %.2f s, take %.1f MB",
            len(self._graphs),
            backend.name,
            self._sizes[-1],
            self.stats.capture_s,
            backend.num_bytes / 1e6,
        )

    def _capture(self, backend: GraphBackend, size: int) -> str:
        """Capture one size; what is in the way of it on any rank."""
        parallel, moe = self._parallel, self._model.config.moe
        plan = plan_step(
            [size] * parallel.config.dp_size,
            parallel.config,
            moe.num_experts_per_tok if moe else 0,
            has_operators=parallel.exchange is not None,
        )
        self._plans[size] = plan
        parallel.step.become(plan)
        agreement = _Agreement(parallel)
        try:
            self._graphs[size] = backend.capture(self._model, self._static.of(size), agreement)
        except CaptureError as error:
            return agreement.outcome(f"{error}")
        return agreement.outcome("")

    def _stay_eager(self, reason: str) -> None:
        self._graphs.clear()
        self._sizes = ()
        self._why_not = reason
        _log.warning("decoding without graphs: %s", reason)

    def graph_size(self, batches: Sequence[Batch], on_layer: OnLayer | None = None) -> int:
        """See `engine.runner.Forward`."""
        if reason := self._why_eager(batches, on_layer):
            self.stats.eager[reason] += 1
            return 0
        return self._sizes[bisect_left(self._sizes, max(len(b.input_ids) for b in batches))]

    def replay(self, batch: Batch, size: int) -> Tensor:
        """See `engine.runner.Forward`."""
        # NOTE: what was compiled in this process is compiled anew where it finds another plan.
        self._parallel.step.become(self._plans[size])
        self._static.fill(batch, size)
        self.stats.num_replays += 1
        hidden = self._graphs[size]()[: len(batch.input_ids)]
        assert self._backend is not None, "there are graphs"
        self.stats.num_recompiles = self._backend.num_compiles - self._num_compiles_at_start
        return hidden

    def __call__(self, batch: Batch, on_layer: OnLayer | None = None) -> Tensor:
        """Hidden states [T, hidden_size] of the batch; valid until the next call."""
        if size := self.graph_size([batch], on_layer):
            return self.replay(batch, size)
        return self._model(batch.input_ids, batch.positions, batch.kv, on_layer)

    def _why_eager(self, batches: Sequence[Batch], on_layer: OnLayer | None) -> str:
        if self._why_not:
            return self._why_not
        if self._takes_drafts:
            if any(batch.kv.num_decode_tokens < len(batch.input_ids) for batch in batches):
                return "prompt tokens in the batch"
        elif any(batch.kv.max_seqlen_q > 1 for batch in batches):
            return "prompt tokens or drafts in the batch"
        if on_layer is not None:
            return "layers are reported"
        if any(batch.has_adapters for batch in batches):
            return "adapters in the batch"
        is_fitting = all(len(batch.input_ids) <= self._sizes[-1] for batch in batches)
        return "" if is_fitting else "batch is too large"


class _Agreement:
    """Of all ranks on one graph: each says once whether it has it."""

    def __init__(self, parallel: Parallel) -> None:
        self._group = parallel.start
        self._problem: str | None = None

    def __call__(self) -> None:
        """This rank has it. Raises: CaptureError: another one has not."""
        self._problem = first_problem(self._group, "")
        if self._problem:
            raise CaptureError(self._problem)

    def outcome(self, own_problem: str) -> str:
        """What is in the way of it, on this rank or on another; empty: nothing."""
        if self._problem is None:
            self._problem = first_problem(self._group, own_problem)
        return self._problem


def _changes_while_serving(parallel: Parallel) -> str:
    """What of a step is not the same every time; empty: nothing."""
    if parallel.config.eplb.collects_heat:
        return "experts are balanced while serving"
    if parallel.config.layer_sharding:
        return "layer_sharding sends weights beside a step"
    if parallel.config.dual_batch_overlap:
        return "dual_batch_overlap divides steps"
    return ""


def graph_forward(config: WorkerConfig, report: Report) -> MakeForward:
    """A GraphRunner with everything captured, for `build_engine`. See `select_backend`."""

    def make(model: CausalLM, ops: Ops, memory: ForwardMemory) -> GraphRunner:
        backend = select_backend(
            config.graph_mode, ops, model, cache_key=config.graph_key, parallel=memory.parallel
        )
        graphs = GraphRunner(model, memory, backend)
        graphs.capture(report)
        return graphs

    return make
