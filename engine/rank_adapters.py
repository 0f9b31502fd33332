"""What one rank holds of LoRA adapters: the part of each that goes with its part of the model."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from engine.layers.layer import weighted_layers
from engine.layers.linear import FusedLinear
from engine.layers.low_rank import (
    AdapterRows,
    LatentAdditions,
    LowRankAdditions,
)
from engine.layers.mla import KVUpProjection
from engine.split import Span


@dataclass(frozen=True, slots=True)
class LowRank:
    """b a, added to the weight of one projection of the whole model; float32."""

    a: Tensor
    """[rank, inputs]."""
    b: Tensor
    """[outputs, rank], scaled."""


AdapterWeights = Mapping[str, LowRank]
"""By the projection's name in checkpoints."""


class _Target(Protocol):
    """A projection that takes an adapter."""

    outputs: Span
    inputs: Span

    def put(self, key: str, weights: LowRank) -> None:
        """Keep this rank's part."""
        ...

    def drop(self, key: str) -> None:
        """Forget it."""
        ...


@dataclass(slots=True)
class _UpProjection:
    """Implements `_Target` for that of latent attention."""

    layer: KVUpProjection
    additions: LatentAdditions
    outputs: Span
    inputs: Span

    def put(self, key: str, weights: LowRank) -> None:
        part = weights.b[self.outputs.index].clone()
        self.additions.put(key, self.layer.low_rank(weights.a.clone(), part))

    def drop(self, key: str) -> None:
        self.additions.put(key, None)


@dataclass(slots=True)
class _Projection:
    """Implements `_Target` for one of those that are computed together."""

    layer: FusedLinear
    additions: LowRankAdditions
    first_column: int
    """Among the outputs of its fused layer."""
    outputs: Span
    inputs: Span

    def put(self, key: str, weights: LowRank) -> None:
        columns = slice(self.first_column, self.first_column + len(self.outputs))
        a = weights.a[:, self.inputs.index].clone()
        b = weights.b[self.outputs.index].clone()
        self.additions.put(key, self.layer.low_rank(columns, a, b))

    def drop(self, key: str) -> None:
        self.additions.drop(key)


class RankAdapters:
    """Belongs to the thread that runs the model.

    Rows of a projection must be those of the batch: with scattered rows or experts on other ranks
    they are not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rows = AdapterRows()
        self._projections: dict[str, _Target] = {}
        for prefix, layer in weighted_layers(model):
            if isinstance(layer, KVUpProjection):
                latent = layer.additions_of(self.rows)
                inputs = Span.whole(layer.num_inputs)
                target = _UpProjection(layer, latent, layer.outputs, inputs)
                self._projections[f"{prefix}kv_b_proj"] = target
            if not isinstance(layer, FusedLinear):
                continue
            layer.additions = additions = LowRankAdditions(self.rows)
            first = 0
            for name, outputs in layer.parts.items():
                projection = _Projection(layer, additions, first, outputs, layer.inputs)
                self._projections[prefix + name] = projection
                first += len(outputs)

    def shape(self, projection: str) -> tuple[int, int] | None:
        """[outputs, inputs] of the whole model's; None: none of this name takes an adapter."""
        found = self._projections.get(projection)
        return None if found is None else (found.outputs.total, found.inputs.total)

    def put(self, key: str, weights: AdapterWeights) -> None:
        """Keep the part of this rank; weights are of the shapes that `shape` says."""
        self.drop([key])
        for name, low_rank in weights.items():
            self._projections[name].put(key, low_rank)

    def drop(self, keys: Collection[str]) -> None:
        """Forget these."""
        for projection in self._projections.values():
            for key in keys:
                projection.drop(key)
