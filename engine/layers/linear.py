"""Linear projections; several that share their input are fused into one matrix product."""

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from engine.config import Quantization
from engine.layers.layer import Shard, WeightedLayer
from engine.layers.low_rank import LowRankAdditions, LowRankDelta
from engine.layers.plain import empty_weight
from engine.layers.quantization import pack_linear
from engine.split import Span
from kernels.experts import ExchangeGroup
from kernels.ops import Linear, Ops, RowProduct
from kernels.quantized import QuantizedRows, concat_rows


class LinearSeries(Protocol):
    """The same linear of all layers, dealt out over ranks; see engine.layer_sharding."""

    quantization: Quantization
    """How its weights are packed."""

    def fetch(self, index: int) -> Linear:
        """The weights of layer `index` of the series, until it is asked for another."""
        ...


class FusedLinear(WeightedLayer):
    """One or more projections of the same input, their outputs side by side.

    `parts` maps each projection's name to its width: {"q_proj": 576, "k_proj": 192, ...}. A Span in
    the place of a width is the part of the outputs that this rank computes. A Span as `in_features`
    is the part of the inputs that it has: its outputs are partial sums, the bias in one rank's.
    """

    def __init__(
        self,
        in_features: int | Span,
        parts: Mapping[str, int | Span],
        *,
        bias: bool,
        ops: Ops,
        is_quantizable: bool = True,
    ) -> None:
        super().__init__()
        self._ops = ops
        self._in = in_features if isinstance(in_features, Span) else Span.whole(in_features)
        self._parts = {
            name: width if isinstance(width, Span) else Span.whole(width)
            for name, width in parts.items()
        }
        self._weight: Tensor | None = empty_weight(self.out_features, len(self._in))
        self._bias: Tensor | None = torch.empty(self.out_features) if bias else None
        self._has_bias = bias
        self._is_quantizable = is_quantizable
        self._series: LinearSeries | None = None
        self._series_index = 0
        self._linear: Linear | None = None
        self.additions: LowRankAdditions | None = None
        """What adapters add; None: the model takes none."""

    @property
    def inputs(self) -> Span:
        """The part of the inputs that this rank has."""
        return self._in

    @property
    def out_features(self) -> int:
        """Outputs that this rank computes."""
        return sum(len(span) for span in self._parts.values())

    @property
    def names(self) -> Collection[str]:
        """Of the projections."""
        return self._parts.keys()

    @property
    def is_split(self) -> bool:
        """Whether this rank has a part of the weights alone."""
        spans = [self._in, *self._parts.values()]
        return any(len(span) < span.total for span in spans)

    def join_series(self, series: "LinearSeries", index: int, *, is_held_here: bool) -> None:
        """Get the weights from a series, where another rank holds them; before they are loaded."""
        self._series, self._series_index = series, index
        if not is_held_here:
            self._weight = self._bias = None

    @property
    def held(self) -> Linear | None:
        """The packed weights, if this rank holds them."""
        return self._linear

    def low_rank(self, columns: slice, a: Tensor, b: Tensor) -> LowRankDelta:
        """a: [rank, in_features]; b: [columns, rank], of some of this rank's outputs."""
        return LowRankDelta(columns, self._ops.linear(a, None), self._ops.linear(b, None))

    def empty(self, quantization: Quantization) -> Linear:
        """Room for weights like these, packed."""
        weight = torch.zeros(self.out_features, len(self._in))
        bias = torch.zeros(len(weight)) if self._has_bias else None
        return pack_linear(
            self._ops, weight, bias, quantization if self._is_quantizable else "none"
        )

    @property
    def has_additions(self) -> bool:
        """Whether adapters add to it in the running forward pass."""
        return self.additions is not None and self.additions.are_in_use

    @property
    def packed(self) -> Linear | None:
        """The product, without what adapters add; None: it is not this rank's for good."""
        return self._linear if self._series is None else None

    @property
    def parts(self) -> Mapping[str, Span]:
        """The part of each projection's outputs that this rank computes, in order."""
        return self._parts

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the fused tensors, one per projection."""
        if self._is_elsewhere:
            return
        assert self._weight is not None, "the weights are packed already"
        start = 0
        for name, span in self._parts.items():
            stop = start + len(span)
            yield f"{name}.weight", self._weight[start:stop]
            if self._bias is not None:
                yield f"{name}.bias", self._bias[start:stop]
            start = stop

    def shards(self) -> Mapping[str, Shard]:
        """Rows of the projections that are split, or columns of all."""
        shards = {}
        for name, span in self._parts.items():
            if len(self._in) < self._in.total:
                shards[f"{name}.weight"] = Shard(1, self._in)
            elif len(span) < span.total:
                shards |= {f"{name}.{kind}": Shard(0, span) for kind in ("weight", "bias")}
        return shards

    def elsewhere(self) -> Iterator[str]:
        """All of it, or nothing."""
        if self._is_elsewhere:
            for name in self._parts:
                yield f"{name}.weight"
                if self._has_bias:
                    yield f"{name}.bias"

    @property
    def _is_elsewhere(self) -> bool:
        return self._series is not None and self._weight is None and self._linear is None

    def pack(self, quantization: Quantization) -> None:
        """Hand the weights to the backend and drop the plain ones."""
        if self._series is not None:
            self._series.quantization = quantization
        if self._is_elsewhere:
            return
        assert self._weight is not None, "the weights are packed already"
        rounding = self.rounding(quantization)
        self._linear = pack_linear(self._ops, self._weight, self._own_bias(), rounding)
        self._weight = self._bias = None

    def rounding(self, quantization: Quantization) -> Quantization:
        """As it says, unless the layer is never quantised."""
        return quantization if self._is_quantizable else "none"

    def quantizable(self) -> Collection[str]:
        """Every projection, but of a series: those are packed alike on all ranks."""
        if self._series is not None:
            return ()
        return [f"{name}.weight" for name in self._parts] if self._is_quantizable else ()

    def pack_quantized(self, weights: Mapping[str, QuantizedRows]) -> bool:
        """Hand the projections to the backend, side by side."""
        fused = concat_rows([weights[f"{name}.weight"] for name in self._parts])
        if fused is None:
            return False
        self._linear = self._ops.quantized_linear(fused, self._own_bias())
        self._weight = self._bias = None
        return True

    def _own_bias(self) -> Tensor | None:
        if self._bias is not None and self._in.start > 0:
            self._bias.zero_()  # the sum over the ranks has it once
        return self._bias

    def reduce_scattered(self, group: ExchangeGroup | None) -> RowProduct | None:
        """See `Ops.reduce_scattered`; None without such a group, or while adapters add."""
        product = self.packed
        if group is None or product is None or self.has_additions:
            return None
        return self._ops.reduce_scattered(product, group)

    def gathered(self, group: ExchangeGroup | None) -> RowProduct | None:
        """See `Ops.gathered`; None without such a group, or while adapters add."""
        product = self.packed
        if group is None or product is None or self.has_additions:
            return None
        return self._ops.gathered(product, group)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, in_features] -> [T, sum of widths]."""
        linear = self._linear
        if self._series is not None:
            linear = self._series.fetch(self._series_index)
        assert linear is not None, "the weights are not loaded"
        out = linear(x)
        if self.additions is not None:
            self.additions.add_(x, out)
        return out
