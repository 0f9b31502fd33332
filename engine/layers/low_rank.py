"""Low-rank additions to projections, a different one for each row of a batch."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRankDelta:
    """b a, added to the weight of some outputs of a projection."""

    columns: slice
    """These outputs."""
    a: Tensor
    """[rank, in_features]."""
    b: Tensor
    """[outputs, rank], scaled."""


class AdapterRows:
    """Which rows of the running forward pass belong to which adapter; one per model."""

    def __init__(self) -> None:
        self.rows: Mapping[str, Tensor] = {}
        """Adapter -> its rows, [n] int64; rows of no adapter are in none."""

    @contextmanager
    def set(self, rows: Mapping[str, Tensor]) -> Iterator[None]:
        """Let these rows be computed with their adapters inside the context."""
        self.rows = rows
        try:
            yield
        finally:
            self.rows = {}


class LowRankAdditions:
    """The deltas of one fused projection, by adapter.

    Source: LoRA (arXiv 2106.09685); many in a batch as in Punica (arXiv 2310.18547).
    """

    def __init__(self, rows: AdapterRows) -> None:
        self._rows = rows
        self._deltas: dict[str, Sequence[LowRankDelta]] = {}

    @property
    def are_in_use(self) -> bool:
        """Whether the running forward pass has rows with adapters."""
        return bool(self._rows.rows)

    def put(self, adapter: str, deltas: Sequence[LowRankDelta]) -> None:
        """Use the deltas for this adapter from now on; none: it leaves this projection alone."""
        if deltas:
            self._deltas[adapter] = deltas
        else:
            self._deltas.pop(adapter, None)

    def add_(self, x: Tensor, out: Tensor) -> None:
        """x: [T, in_features], the projection's input; out: [T, out_features], its output."""
        for adapter, rows in self._rows.rows.items():
            deltas = self._deltas.get(adapter)
            if deltas is None:
                continue
            part = x.index_select(0, rows)
            for delta in deltas:
                out[rows, delta.columns] += (part @ delta.a.T) @ delta.b.T
