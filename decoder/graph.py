"""Graph-mode decode: the forward pass of a decode batch, captured once per size and replayed.

    batch of N decodes --smallest size >= N--> copied into static buffers, padded --> replay
                    \\-- nothing fits --> eager, counted by reason

A backend turns a forward pass over static tensors into something that can be run again; it knows
nothing of requests. Everything is captured before a worker serves, nothing afterwards.
"""

import importlib
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from decoder.native_graph import NativeBackend
from engine.batch import Batch, KVBatch
from engine.layers.attention import OnLayer
from engine.models import CausalLM
from engine.runner import ForwardMemory, ForwardStats, MakeForward
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
    def num_compiles(self) -> int:
        """Compilations and captures so far; one while serving is a mistake, and shows."""
        ...

    def batch_sizes(self, max_num_seqs: int) -> Sequence[int]:
        """Sizes that are worth a graph each, ascending; batches between two are padded."""
        ...

    def capture(self, forward: ForwardFn, batch: Batch) -> Callable[[], Tensor]:
        """Capture forward(batch.input_ids, batch.positions, batch.kv) on these very tensors.

        The result computes it anew from what the tensors, the KV caches included, hold by then. Its
        output may be overwritten by the next replay of any graph. Larger sizes are captured first.

        Raises: CaptureError: the model does something that cannot be replayed; says what.
        """
        ...


def select_backend(
    mode: str, ops: Ops, model: CausalLM, *, multiple_of: int = 1, cache_key: str = ""
) -> GraphBackend | None:
    """The backend for a graph_mode; None for eager. `auto` takes what suits the ops.

    multiple_of: what batch sizes of graphs are multiples of, so that rows can be scattered over so
    many ranks without a remainder.
    cache_key: of graphs that are kept on disk; see `WorkerConfig.graph_key`.

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
    if mode == "native":
        return NativeBackend()
    # NOTE: imported here because torch_npu exists on Ascend hosts alone.
    module = importlib.import_module("decoder.graph_npu")
    if mode == "torchair":
        compiled: GraphBackend = module.TorchairBackend(
            model, multiple_of=multiple_of, cache_key=cache_key
        )
        return compiled
    captured: GraphBackend = module.AclGraphBackend(ops, multiple_of=multiple_of)
    return captured


class GraphRunner:
    """The forward pass of a decoder; see `engine.runner.Forward`."""

    def __init__(
        self, model: CausalLM, memory: ForwardMemory, backend: GraphBackend | None
    ) -> None:
        """Captures nothing yet; until `capture` is called, everything runs eagerly."""
        self._model = model
        self._backend = backend
        self._sizes = tuple(backend.batch_sizes(memory.max_num_seqs)) if backend else ()
        has_host_lengths = backend is not None and backend.has_host_lengths
        self._static = _StaticBatch(memory, max(self._sizes, default=0), has_host_lengths)
        self._graphs: dict[int, Callable[[], Tensor]] = {}
        self._num_compiles_at_start = 0
        self._why_not = "nothing is captured" if backend else "graph_mode is eager"
        self.stats = ForwardStats()

    @torch.inference_mode()
    def capture(self, report: Report) -> None:
        """Capture every size; when the model cannot be captured, say why and stay eager."""
        if self._backend is None:
            return
        for done, size in enumerate(reversed(self._sizes)):
            report("capturing graphs", done / len(self._sizes))
            try:
                self._graphs[size] = self._backend.capture(self._model, self._static.of(size))
            except CaptureError as error:
                self._graphs.clear()
                self._sizes = ()
                self._why_not = f"{self._backend.name} graphs: {error}"
                _log.warning("decoding without graphs: %s", error)
                break
        else:
            self._why_not = ""
        self._num_compiles_at_start = self._backend.num_compiles

    def __call__(self, batch: Batch, on_layer: OnLayer | None = None) -> Tensor:
        """Hidden states [T, hidden_size] of the batch; valid until the next call."""
        num_seqs = len(batch.input_ids)
        if reason := self._why_eager(batch, on_layer):
            self.stats.eager[reason] += 1
            return self._model(batch.input_ids, batch.positions, batch.kv, on_layer)
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        self._static.fill(batch, size)
        self.stats.num_replays += 1
        hidden = self._graphs[size]()[:num_seqs]
        assert self._backend is not None, "there are graphs"
        self.stats.num_recompiles = self._backend.num_compiles - self._num_compiles_at_start
        return hidden

    def _why_eager(self, batch: Batch, on_layer: OnLayer | None) -> str:
        if self._why_not:
            return self._why_not
        if batch.kv.max_seqlen_q > 1:
            return "prompt tokens or drafts in the batch"
        if on_layer is not None:
            return "layers are reported"
        if batch.has_adapters:
            return "adapters in the batch"
        return "" if len(batch.input_ids) <= self._sizes[-1] else "batch is too large"


def graph_forward(
    mode: str, report: Report, *, multiple_of: int = 1, cache_key: str = ""
) -> MakeForward:
    """A GraphRunner with everything captured, for `build_engine`. See `select_backend`."""

    def make(model: CausalLM, ops: Ops, memory: ForwardMemory) -> GraphRunner:
        backend = select_backend(mode, ops, model, multiple_of=multiple_of, cache_key=cache_key)
        graphs = GraphRunner(model, memory, backend)
        graphs.capture(report)
        return graphs

    return make


class _StaticBatch:
    """The tensors that graphs read, one set for all sizes."""

    def __init__(self, memory: ForwardMemory, max_num_seqs: int, has_host_lengths: bool) -> None:
        device = memory.k_caches[0].device
        lengths = torch.device("cpu") if has_host_lengths else device

        def filled(value: int, *shape: int, device: torch.device = device) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        self._caches = (memory.k_caches, memory.v_caches)
        self._input_ids, self._positions = (filled(0, max_num_seqs) for _ in range(2))
        # A capture runs the model: its rows are padding, which sees one key and writes nothing.
        self._slots = filled(-1, max_num_seqs)
        self._contexts = filled(1, max_num_seqs, device=lengths)
        self._table = filled(0, max_num_seqs, memory.max_blocks)
        self._starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=lengths)

    def of(self, size: int) -> Batch:
        """A batch of `size` decodes; the same tensors each time."""
        kv = KVBatch(
            *self._caches,
            slot_mapping=self._slots[:size],
            block_table=self._table[:size],
            cu_seqlens_q=self._starts[: size + 1],
            context_lens=self._contexts[:size],
            max_seqlen_q=1,
            num_decode_seqs=size,
            num_decode_tokens=size,
        )
        return Batch(self._input_ids[:size], self._positions[:size], kv, self._starts[:size])

    def fill(self, batch: Batch, size: int) -> None:
        """Copy a batch in. Rows from its end up to `size` see one key and write nothing."""
        num_seqs, kv = len(batch.input_ids), batch.kv
        self._input_ids[:num_seqs] = batch.input_ids
        self._positions[:num_seqs] = batch.positions
        self._slots[:num_seqs] = kv.slot_mapping
        self._contexts[:num_seqs].copy_(kv.context_lens, non_blocking=True)
        width = min(kv.block_table.shape[1], self._table.shape[1])
        self._table[:num_seqs, :width] = kv.block_table[:, :width]
        if num_seqs < size:
            self._input_ids[num_seqs:size] = 0
            self._positions[num_seqs:size] = 0
            self._slots[num_seqs:size] = -1
            self._contexts[num_seqs:size] = 1
            self._table[num_seqs:size, 0] = 0
