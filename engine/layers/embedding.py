"""Token embedding and the projection back to the vocabulary, which may share one weight."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.config import Quantization
from engine.layers.layer import WeightedLayer
from kernels.ops import Linear, Ops


class Embedding(WeightedLayer):
    """token_ids [T] -> [T, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int, *, name: str, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self._name = name
        self._weight: Tensor | None = torch.empty(vocab_size, hidden_size)
        self._shared: Linear | None = None

    @property
    def weight(self) -> Tensor:
        """The table; gone once `share` was called."""
        assert self._weight is not None, "the table lives in the output projection"
        return self._weight

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The table."""
        yield f"{self._name}.weight", self.weight

    def share(self, linear: Linear) -> None:
        """Look rows up in a packed copy of the same table, and drop the plain one."""
        self._shared = linear
        self._weight = None

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look the rows up."""
        if self._shared is not None:
            return self._shared.rows(token_ids)
        return self._ops.embedding(token_ids, self.weight)


class LMHead(WeightedLayer):
    """hidden [R, hidden_size] -> logits [R, vocab_size]; `tied`: with that embedding's weight."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, name: str, tied: Embedding | None, ops: Ops
    ) -> None:
        super().__init__()
        self._ops = ops
        self._name = name
        self._tied = tied
        self._weight: Tensor | None = (
            torch.empty(vocab_size, hidden_size) if tied is None else tied.weight
        )
        self._linear: Linear | None = None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The matrix; none if it is the embedding's."""
        assert self._weight is not None, "the weights are packed already"
        if self._tied is None:
            yield f"{self._name}.weight", self._weight

    def pack(self, quantization: Quantization) -> None:
        """Hand the weight to the backend and drop the plain one; the vocabulary stays in float."""
        assert self._weight is not None, "the weights are packed already"
        self._linear = self._ops.linear(self._weight, None)
        self._weight = None
        if self._tied is not None:
            self._tied.share(self._linear)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden_size] -> [R, vocab_size]."""
        assert self._linear is not None, "the weights are not loaded"
        return self._linear(hidden)
