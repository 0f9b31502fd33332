"""Token embedding and the projection back to the vocabulary, which may share one weight.

The vocabulary is split over the tensor-parallel group, the same number of rows on every rank; those
past its end are zeros.
"""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from engine.config import Quantization
from engine.layers.layer import Shard, WeightedLayer
from engine.layers.plain import empty_weight
from engine.layers.quantization import pack_vocabulary, vocabulary_rounding
from engine.layers.rows import rows_of
from engine.parallel import Parallel
from engine.split import Span
from kernels.ops import Linear, Ops
from kernels.quantized import PaddedRows, QuantizedRows

_FLOATS = torch.empty(0)
"""Rows of a packed table are in float32."""


class Embedding(WeightedLayer):
    """token_ids [T] -> [T, hidden_size]; rows as they are between blocks."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, name: str, ops: Ops, parallel: Parallel
    ) -> None:
        super().__init__()
        self._ops = ops
        self._name = name
        self._rows = rows_of(parallel)
        self._tape = parallel.tape
        self._hidden_size = hidden_size
        self._span, self._weight = _empty_vocabulary(vocab_size, hidden_size, parallel)
        self._shared: Linear | None = None

    @property
    def shared(self) -> Linear | None:
        """The packed table, if rows are looked up there."""
        return self._shared

    @property
    def weight(self) -> Tensor:
        """This rank's rows of the table, padding included; gone once `share` was called."""
        assert self._weight is not None, "the table lives in the output projection"
        return self._weight

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The table."""
        yield f"{self._name}.weight", self.weight[: len(self._span)]

    def shards(self) -> Mapping[str, Shard]:
        """This rank's rows."""
        return _vocabulary_shard(f"{self._name}.weight", self._span)

    def pack(self, quantization: Quantization) -> None:
        """Hand the table to the backend, unless it is shared: then the projection does."""
        if self._weight is not None:
            self._weight = self._ops.parameter(self._weight)

    def quantizable(self) -> Collection[str]:
        """The table."""
        return (f"{self._name}.weight",)

    def pack_quantized(self, weights: Mapping[str, QuantizedRows]) -> bool:
        """Hand the table to the backend; a tied projection takes it from here."""
        (weight,) = weights.values()
        self.share(self._ops.quantized_vocabulary(PaddedRows(weight, len(self.weight))))
        return True

    def share(self, linear: Linear) -> None:
        """Look rows up in a packed copy of the same table, and drop the plain one."""
        self._shared = linear
        self._weight = None

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look the rows up."""
        if len(self._span) == self._span.total:
            return self._rows.reduce(self._look_up(token_ids))
        sizes = (len(token_ids), self._hidden_size)
        like = _FLOATS if self._weight is None else self._weight
        return self._rows.reduce(self._tape.between(self._own_rows, token_ids, sizes, like))

    def _own_rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the table's part, zeros where it has none."""
        local_ids = token_ids - self._span.start
        is_elsewhere = (local_ids < 0) | (local_ids >= len(self._span))
        rows = self._look_up(local_ids.masked_fill(is_elsewhere, 0))
        return rows.masked_fill(is_elsewhere[:, None], 0)

    def _look_up(self, row_ids: Tensor) -> Tensor:
        if self._shared is not None:
            return self._shared.rows(row_ids)
        return self._ops.embedding(row_ids, self.weight)


class LMHead(WeightedLayer):
    """hidden [R, hidden_size] -> logits [R, vocab_size]; `tied`: with that embedding's weight."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        name: str,
        tied: Embedding | None,
        ops: Ops,
        parallel: Parallel,
    ) -> None:
        super().__init__()
        self._ops = ops
        self._name = name
        self._tied = tied
        self._group = parallel.tp
        self._weight: Tensor | None
        if tied is None:
            self._span, self._weight = _empty_vocabulary(vocab_size, hidden_size, parallel)
        else:
            self._span, self._weight = _vocabulary_span(vocab_size, parallel), tied.weight
        self._linear: Linear | None = None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The matrix; none if it is the embedding's."""
        assert self._weight is not None, "the weights are packed already"
        if self._tied is None:
            yield f"{self._name}.weight", self._weight[: len(self._span)]

    def shards(self) -> Mapping[str, Shard]:
        """This rank's rows."""
        return _vocabulary_shard(f"{self._name}.weight", self._span)

    def rounding(self, quantization: Quantization) -> Quantization:
        """Never below 8 bits."""
        return vocabulary_rounding(quantization)

    def pack(self, quantization: Quantization) -> None:
        """Hand the weight to the backend and drop the plain one."""
        assert self._weight is not None, "the weights are packed already"
        if self._tied is not None and self._tied.shared is not None:
            self._linear = self._tied.shared
        else:
            self._linear = pack_vocabulary(self._ops, self._weight, quantization)
        self._weight = None
        if self._tied is not None:
            self._tied.share(self._linear)

    def shares(self) -> WeightedLayer | None:
        """The embedding, if it is tied."""
        return self._tied

    def quantizable(self) -> Collection[str]:
        """The matrix, unless it is the embedding's."""
        return (f"{self._name}.weight",) if self._tied is None else ()

    def pack_quantized(self, weights: Mapping[str, QuantizedRows]) -> bool:
        """Hand the matrix to the backend."""
        assert self._weight is not None, "the weights are packed already"
        (weight,) = weights.values()
        self._linear = self._ops.quantized_vocabulary(PaddedRows(weight, len(self._weight)))
        self._weight = None
        return True

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden_size] -> [R, vocab_size], on every rank."""
        assert self._linear is not None, "the weights are not loaded"
        logits = self._linear(hidden)
        if len(self._span) == self._span.total:
            return logits
        # [tp, R, V / tp]
        gathered = self._group.all_gather(logits).view(self._group.size, *logits.shape)
        return gathered.transpose(0, 1).flatten(1)[:, : self._span.total]


def _vocabulary_span(vocab_size: int, parallel: Parallel) -> Span:
    width = -(-vocab_size // parallel.tp.size)
    start = min(parallel.tp.rank * width, vocab_size)
    return Span(start, min(start + width, vocab_size), vocab_size)


def _empty_vocabulary(
    vocab_size: int, hidden_size: int, parallel: Parallel
) -> tuple[Span, Tensor | None]:
    """This rank's rows, and memory for them and the padding."""
    span = _vocabulary_span(vocab_size, parallel)
    weight = empty_weight(-(-vocab_size // parallel.tp.size), hidden_size)
    weight[len(span) :].zero_()
    return span, weight


def _vocabulary_shard(name: str, span: Span) -> Mapping[str, Shard]:
    return {name: Shard(0, span)} if len(span) < span.total else {}
