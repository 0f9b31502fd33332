"""Graphs whose every replay is compared with the eager model, bit by bit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoder.graph import GraphRunner
from decoder.native_graph import NativeBackend
from engine.batch import Batch, KVBatch
from engine.models import CausalLM
from engine.runner import ForwardMemory
from kernels.kv_cache import tensors_of
from kernels.ops import Ops


class CheckedGraphs(GraphRunner):
    """Raises AssertionError where a replay leaves other states or another cache than the model."""

    def __init__(
        self, model: CausalLM, memory: ForwardMemory, backend: NativeBackend | None
    ) -> None:
        super().__init__(model, memory, backend)
        self._eager = model
        self.replayed: set[tuple[int, int]] = set()
        """(rows of the batch, rows of the graph)."""
        self.seqlens: set[int] = set()
        """Rows of a sequence that were seen in replays."""

    def replay(self, batch: Batch, size: int) -> Tensor:
        self.replayed.add((len(batch.input_ids), size))
        self.seqlens.update(batch.kv.cu_seqlens_q.diff().tolist())
        before = [part.clone() for part in _caches(batch.kv)]
        expected = self._eager(batch.input_ids, batch.positions, batch.kv).clone()
        written = [part.clone() for part in _caches(batch.kv)]
        for part, old in zip(_caches(batch.kv), before, strict=True):
            part.copy_(old)
        hidden = super().replay(batch, size)
        assert torch.equal(hidden, expected)
        for part, wanted in zip(_caches(batch.kv), written, strict=True):
            assert torch.equal(_bits(part), _bits(wanted))
        return hidden


class Maker:
    """Makes CheckedGraphs, and keeps them."""

    graphs: CheckedGraphs

    def __init__(self, backend: NativeBackend | None) -> None:
        self._backend = backend

    def __call__(self, model: CausalLM, ops: Ops, memory: ForwardMemory) -> CheckedGraphs:
        self.graphs = CheckedGraphs(model, memory, self._backend)
        self.graphs.capture(lambda phase, progress: None)
        return self.graphs


def _caches(kv: KVBatch) -> Sequence[Tensor]:
    parts = [part for cache in (*kv.k_caches, *kv.v_caches) for part in tensors_of(cache)]
    return [part for part in parts if part is not None]


def _bits(part: Tensor) -> Tensor:
    """NaN, which fills what nobody wrote, is not equal to itself."""
    return part if part.dtype == torch.int8 else part.view(torch.int32)
