"""Linear projections; several that share their input are fused into one matrix product."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from engine.config import Quantization
from engine.layers.layer import WeightedLayer
from engine.layers.quantization import pack_linear
from kernels.ops import Linear, Ops


class FusedLinear(WeightedLayer):
    """One or more projections of the same input, their outputs side by side.

    `parts` maps each projection's name to its width: {"q_proj": 576, "k_proj": 192, ...}.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        ops: Ops,
        is_quantizable: bool = True,
    ) -> None:
        super().__init__()
        out_features = sum(parts.values())
        self._ops = ops
        self._parts = dict(parts)
        self._weight: Tensor | None = torch.empty(out_features, in_features)
        self._bias: Tensor | None = torch.empty(out_features) if bias else None
        self._is_quantizable = is_quantizable
        self._linear: Linear | None = None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the fused tensors, one per projection."""
        assert self._weight is not None, "the weights are packed already"
        start = 0
        for name, width in self._parts.items():
            yield f"{name}.weight", self._weight[start : start + width]
            if self._bias is not None:
                yield f"{name}.bias", self._bias[start : start + width]
            start += width

    def pack(self, quantization: Quantization) -> None:
        """Hand the weights to the backend and drop the plain ones."""
        assert self._weight is not None, "the weights are packed already"
        if not self._is_quantizable:
            quantization = "none"
        self._linear = pack_linear(self._ops, self._weight, self._bias, quantization)
        self._weight = self._bias = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, in_features] -> [T, sum of widths]."""
        assert self._linear is not None, "the weights are not loaded"
        return self._linear(x)
