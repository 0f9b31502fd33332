"""Root-mean-square normalisation."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.config import Quantization
from engine.layers.layer import WeightedLayer
from kernels.ops import Ops


class RMSNorm(WeightedLayer):
    """x / rms(x) * weight over the last dim; `name` is the weight's module name in checkpoints.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv 1910.07467).
    """

    def __init__(self, size: int, eps: float, *, name: str, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self._name = name
        self._eps = eps
        self._weight = torch.empty(size)

    @property
    def weight(self) -> Tensor:
        """[size]: for an op that normalises on its way."""
        return self._weight

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The scale."""
        yield f"{self._name}.weight", self._weight

    def pack(self, quantization: Quantization) -> None:
        """Hand the scale to the backend."""
        self._weight = self._ops.parameter(self._weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, size] or [T, heads, size]; the shape stays."""
        return self._ops.rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add x to the residual stream; return (its norm, the stream). May overwrite both."""
        return self._ops.add_rms_norm(x, residual, self._weight, self._eps)
