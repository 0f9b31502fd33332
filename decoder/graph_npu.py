"""Decode steps as one launch on the NPU: graphs of TorchAir, or captured ones.

    torchair   traced, converted to a graph of the Graph Engine and compiled, once per size, and
               kept on disk. Sequence lengths are tensors in it.
    aclgraph   launches are recorded. Attention took its lengths from the host when it was
               recorded, so before every replay its tasks are given new ones:

        capture, per attention:  wait(event), reset(event), [ task group: attention ]
        replay:  update stream, per attention: [ the task again ], record(event);  graph.replay()

Only decode steps have graphs; all else runs eagerly.

Source: torch_npu 2.13.0, torch_npu/npu/graphs.py and dynamo/torchair/inference.
"""

import hashlib
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch_npu
import torch_npu.dynamo.torchair
from torch import Tensor, nn
from torch._dynamo.utils import counters as dynamo_counters
from torch._functorch import config as functorch
from torchair import CompilerConfig
from torchair.ge._ge_graph import GeGraph
from torchair.inference import cache_compile

from decoder.graph_sizes import plan_sizes
from engine.batch import Batch, KVBatch
from engine.layers.experts import Experts
from engine.models import CausalLM
from engine.parallel import Parallel
from kernels.ascend.attention import AttentionCall, launch
from kernels.ascend.mla import token_major
from kernels.graph import CaptureError
from kernels.kv_cache import floats_of
from kernels.npu import NpuOps

_MAX_TORCHAIR_GRAPHS = 12
_MAX_ACL_GRAPHS = 32

ForwardFn = Callable[[Tensor, Tensor, KVBatch], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchairSettings:
    """What the compiler is told. Defaults suit inference on static shapes."""

    frozen_parameter: bool = True
    """Weights neither move nor change: the Graph Engine may hold them as constants."""
    tiling_schedule_optimize: bool = True
    """Operators are cut into tiles on the device. Decode attention is in BNSD, which allows it."""
    topology_sorting_strategy: str = "StableRDFS"
    """Nodes run in the order of the model's code, which the streams' waits rely on."""
    enable_view_optimize: bool = True
    """Folds views into their neighbours. Off where a rank has one expert: there a Transpose would
    become views, and not fuse with the product.
    """

    def config(self) -> CompilerConfig:
        """The same as TorchAir takes it."""
        config = CompilerConfig()
        experimental = config.experimental_config
        experimental.frozen_parameter = self.frozen_parameter
        experimental.tiling_schedule_optimize = self.tiling_schedule_optimize
        experimental.topology_sorting_strategy = self.topology_sorting_strategy
        experimental.enable_view_optimize = self.enable_view_optimize
        return config


def settings_of(model: nn.Module) -> TorchairSettings:
    """The settings for this rank's part of a model."""
    experts = [layer for layer in model.modules() if isinstance(layer, Experts)]
    has_one = any(layer.num_local_experts == 1 for layer in experts)
    return TorchairSettings(enable_view_optimize=not has_one)


class DecodeStep(nn.Module):
    """A decode step of one size as a method of its own: TorchAir's cache goes by its name."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    def method(self, size: int) -> Callable[..., Tensor]:
        """decode_<size>, which no other size shares code with."""
        name = f"decode_{size}"
        function = types.FunctionType(
            DecodeStep._decode.__code__.replace(co_name=name),
            DecodeStep._decode.__globals__,
            name,
        )
        function.__qualname__ = f"DecodeStep.{name}"
        return types.MethodType(function, self)

    def _decode(  # type: ignore[no-untyped-def]
        self,
        input_ids,
        positions,
        slot_mapping,
        block_table,
        cu_seqlens_q,
        context_lens,
        k_caches,
        v_caches,
    ):
        size = input_ids.shape[0]
        kv = KVBatch(
            k_caches=k_caches,
            v_caches=v_caches,
            slot_mapping=slot_mapping,
            block_table=block_table,
            cu_seqlens_q=cu_seqlens_q,
            # Attention takes int64; cast here, it is cast once and not in every layer.
            context_lens=context_lens.long(),
            max_seqlen_q=1,
            num_decode_seqs=size,
            num_decode_tokens=size,
        )
        return self.model(input_ids, positions, kv)


def step_arguments(batch: Batch) -> tuple[Any, ...]:
    """What `DecodeStep` reads, the caches of latent attention in the form that graphs write to."""
    kv = batch.kv
    caches = [list(kv.k_caches), list(kv.v_caches)]
    if kv.k_caches[0].shape[-1] != kv.v_caches[0].shape[-1]:
        caches = [[token_major(floats_of(cache)) for cache in part] for part in caches]
    return (
        batch.input_ids,
        batch.positions,
        kv.slot_mapping,
        kv.block_table,
        kv.cu_seqlens_q,
        kv.context_lens,
        *caches,
    )


class TorchairBackend:
    """Implements `decoder.graph.GraphBackend`."""

    name = "torchair"
    has_host_lengths = False
    takes_drafts = False
    num_bytes = 0

    def __init__(
        self,
        model: CausalLM,
        *,
        parallel: Parallel | None = None,
        cache_folder: Path | None = None,
        cache_key: str = "",
        settings: TorchairSettings | None = None,
    ) -> None:
        """parallel: the model's. cache_key: what graphs depend on besides the model's config,
        versions, the rank, and what HCCL calls the groups of operators that communicate.
        cache_folder: None is one in the user's home.
        """
        self._step = DecodeStep(model)
        self._settings = settings or settings_of(self._step)
        self._parallel = parallel or Parallel()
        folder = cache_folder or Path.home() / ".cache" / "pdserve" / "torchair"
        self.folder = folder / _digest(model, cache_key, self._parallel)
        """Where compiled graphs are kept."""
        self._num_graphs_before = _num_traced()

    @property
    def num_compiles(self) -> int:
        """Graphs that this process has traced since; those that came from disk are not."""
        return _num_traced() - self._num_graphs_before

    def batch_sizes(self, max_num_rows: int) -> Sequence[int]:
        """Few: each takes a minute or so to compile on hardware, once."""
        return plan_sizes(
            max_num_rows,
            multiple_of=self._parallel.config.tp_size,
            max_graphs=_MAX_TORCHAIR_GRAPHS,
        )

    def capture(
        self, forward: ForwardFn, batch: Batch, agree: Callable[[], None]
    ) -> Callable[[], Tensor]:
        """See `GraphBackend.capture`; `forward` is the model. Compiles, or loads from disk."""
        counters = self._parallel.counters
        # What a rank cannot compute should not fail behind minutes of compiling; and of a graph
        # nobody can tell what it communicates.
        with counters.aside() as counts:
            forward(batch.input_ids, batch.positions, batch.kv)
        self.folder.mkdir(parents=True, exist_ok=True)
        compiled = cache_compile(
            self._step.method(len(batch.input_ids)),
            config=self._settings.config(),
            dynamic=False,
            cache_dir=str(self.folder),
            ge_cache=True,
        )
        arguments = step_arguments(batch)

        def replay() -> Tensor:
            hidden: Tensor = compiled(*arguments)
            counters.add_all(counts)
            return hidden

        # The latent-cache operator returns the caches it wrote: torch warns of it, or refuses where
        # the environment says CI. The graph is ordered by what it returns, so it is needed.
        with functorch.patch(error_on_custom_op_aliasing=False), counters.aside():
            _compile(replay, agree)  # what is not compiled by now would be while serving
        return replay


def _num_traced() -> int:
    """Graphs that dynamo has handed to a compiler in this process, TorchAir or another.

    NOTE: not its callbacks on_compile_start: torch._dynamo.reset() drops them.
    """
    return int(dynamo_counters["stats"]["unique_graphs"])


def _compile(run: Callable[[], Tensor], agree: Callable[[], None]) -> None:
    """Run a graph for the first time, which compiles it, and agree between these two.

    A rank that runs a graph waits in its collectives for one that could not compile it, and the
    device with it. TorchAir has no call that only compiles; what it compiles runs here.

    Raises: CaptureError: it does not compile, here or elsewhere.
    """
    launch, agreed = GeGraph.run, False

    def launch_once_agreed(graph: GeGraph, *args: Any, **kwargs: Any) -> Any:
        nonlocal agreed
        agree()
        agreed = True
        GeGraph.run = launch
        return launch(graph, *args, **kwargs)

    GeGraph.run = launch_once_agreed
    try:
        run()
    except CaptureError:
        raise
    except (RuntimeError, ValueError, AssertionError, OSError) as error:
        if agreed:
            raise
        raise CaptureError(f"TorchAir: {error}".splitlines()[0]) from error
    finally:
        GeGraph.run = launch
    if not agreed:  # it has run, but not by the Graph Engine
        agree()


def _digest(model: CausalLM, cache_key: str, parallel: Parallel) -> str:
    """Names what a compiled graph depends on and TorchAir's own key, which has ranks, has not.

    TorchAir brings the names of communicators up to date in its own collectives, not in operators
    of the device that communicate themselves.
    """
    versions = (torch.__version__, torch_npu.__version__)
    groups = (parallel.exchange, parallel.fused_tp)
    names = [group.communicator for group in groups if group is not None]
    parts = repr((model.config, cache_key, versions, names))
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


@dataclass(slots=True)
class _Task:
    """One attention of a captured graph, and what its lengths wait for."""

    call: AttentionCall
    out: Tensor
    lse: Tensor
    workspace: Tensor
    event: Any
    handle: Any = None


@dataclass(slots=True)
class _Recorder:
    """Captures attention as tasks that can be updated."""

    npu: Any
    stream: Any
    tasks: list[_Task] = field(default_factory=list)
    workspace: Tensor | None = None

    def launch(self, call: AttentionCall) -> Tensor:
        """Stands in for kernels.ascend.attention.launch while a graph is captured."""
        arguments = (call.query, call.key, call.value)
        lengths = call.host_lengths()
        if self.workspace is None:
            self.workspace = torch.ops.npu._npu_fused_infer_attention_score_v2_get_max_workspace(
                *arguments, **lengths, **call.options
            )
        width = (*call.query.shape[:-1], call.value.shape[-1])
        task = _Task(
            call=call,
            out=call.query.new_empty(width),
            lse=call.query.new_empty(1, dtype=torch.float32),
            workspace=self.workspace,
            event=self.npu.ExternalEvent(),
        )
        task.event.wait(self.stream)
        task.event.reset(self.stream)
        self.npu.graph_task_group_begin(self.stream)
        _launch_into(task)
        task.handle = self.npu.graph_task_group_end(self.stream)
        self.tasks.append(task)
        return task.out

    def update(self, stream: Any) -> None:
        """Give every task the lengths that the static batch holds by now."""
        with self.npu.stream(stream):
            for task in self.tasks:
                self.npu.graph_task_update_begin(stream, task.handle)
                _launch_into(task)
                self.npu.graph_task_update_end(stream)
                task.event.record(stream)


def _launch_replayable(call: AttentionCall) -> Tensor:
    """Launch it. Raises: CaptureError: it depends on lengths by more than being given them."""
    if "atten_mask" in call.options:
        raise CaptureError("a window's mask follows the lengths, which a captured graph would keep")
    return launch(call)


def _launch_into(task: _Task) -> None:
    call = task.call
    torch.ops.npu.npu_fused_infer_attention_score_v2.out(
        call.query,
        call.key,
        call.value,
        **call.host_lengths(),
        **call.options,
        workspace=task.workspace,
        out=[task.out, task.lse],
    )


class AclGraphBackend:
    """Implements `decoder.graph.GraphBackend`; reads sequence lengths on the host."""

    name = "aclgraph"
    has_host_lengths = True
    takes_drafts = False
    num_bytes = 0

    def __init__(
        self, ops: NpuOps, *, npu: Any = torch_npu.npu, parallel: Parallel | None = None
    ) -> None:
        """parallel: the model's."""
        self._ops = ops
        self._npu = npu
        self._parallel = parallel or Parallel()
        self._stream = npu.Stream()
        self._update_stream = npu.Stream()
        self._pool: Any = None
        self.num_compiles = 0

    def batch_sizes(self, max_num_rows: int) -> Sequence[int]:
        """Bounded: a graph takes streams and events, of which a device has a fixed number."""
        return plan_sizes(
            max_num_rows, multiple_of=self._parallel.config.tp_size, max_graphs=_MAX_ACL_GRAPHS
        )

    def capture(
        self, forward: ForwardFn, batch: Batch, agree: Callable[[], None]
    ) -> Callable[[], Tensor]:
        """See `GraphBackend.capture`."""
        npu, counters = self._npu, self._parallel.counters
        # Once eagerly: what allocates or compiles on its first run must not do so in a capture.
        with self._ops.attention_through(_launch_replayable), counters.aside() as counts:
            forward(batch.input_ids, batch.positions, batch.kv)
        npu.synchronize()
        graph = npu.NPUGraph()
        recorder = _Recorder(npu, self._stream)
        try:
            with (
                npu.graph(graph, pool=self._pool, stream=self._stream),
                self._ops.attention_through(recorder.launch),
                counters.aside(),
            ):
                hidden = forward(batch.input_ids, batch.positions, batch.kv)
        except RuntimeError as error:  # such as streams and events that the device has no more of
            raise CaptureError(f"{error}".splitlines()[0]) from error
        self._pool = graph.pool()
        self.num_compiles += 1
        agree()

        def replay() -> Tensor:
            # NOTE: the last replay must be over: its tasks would be updated under it.
            npu.current_stream().synchronize()
            recorder.update(self._update_stream)
            graph.replay()
            counters.add_all(counts)
            return hidden

        return replay
