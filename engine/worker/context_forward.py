"""Runs the leader's model where context-parallel ranks share the rows of every step."""

import torch
from torch import Tensor

from engine.batch import Batch
from engine.layers.attention import OnLayer
from engine.runner import ForwardStats
from engine.worker.leading_model import LeadingModel


class ContextForward:
    """Implements engine.runner.Forward: other ranks send the states that are read, no others."""

    def __init__(self, model: LeadingModel) -> None:
        self._model = model
        self.stats = ForwardStats()

    def __call__(self, batch: Batch, on_layer: OnLayer | None = None) -> Tensor:
        """See `Forward`; rows that nobody reads are zeros."""
        self.stats.eager["graphs are for decoders"] += 1
        wanted = batch.sample_rows
        if batch.needs_all_rows:
            wanted = torch.arange(len(batch.input_ids), dtype=torch.int32)
        self._model.parallel.step.wanted_rows = wanted
        return self._model(batch.input_ids, batch.positions, batch.kv, on_layer)
