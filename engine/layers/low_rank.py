"""Low-rank additions to projections, a different one for each row of a batch.

NOTE: all products are the backend's own, so what is added to a row depends on no other row: a
request with an adapter keeps its tokens however it is batched, cut into chunks or computed anew.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from kernels.ops import Linear, Ops


@dataclass(frozen=True, slots=True)
class LowRankDelta:
    """b a, added to the weight of some outputs of a projection."""

    columns: slice
    """These outputs."""
    down: Linear
    """a: [rank, in_features]."""
    up: Linear
    """b: [outputs, rank], scaled."""


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
        self._deltas: dict[str, list[LowRankDelta]] = {}

    @property
    def are_in_use(self) -> bool:
        """Whether the running forward pass has rows with adapters."""
        return bool(self._rows.rows)

    def put(self, adapter: str, delta: LowRankDelta) -> None:
        """Use the delta, beside those of other outputs, for this adapter from now on."""
        self._deltas.setdefault(adapter, []).append(delta)

    def drop(self, adapter: str) -> None:
        """Leave this projection alone."""
        self._deltas.pop(adapter, None)

    def add_(self, x: Tensor, out: Tensor) -> None:
        """x: [T, in_features], the projection's input; out: [T, out_features], its output."""
        for adapter, rows in self._rows.rows.items():
            deltas = self._deltas.get(adapter)
            if deltas is None:
                continue
            part = x.index_select(0, rows)
            for delta in deltas:
                out[rows, delta.columns] += delta.up(delta.down(part))


@dataclass(frozen=True, slots=True)
class LatentDelta:
    """b a, added to the up-projection of latent attention, b by head."""

    down: Linear
    """a: [rank, R]."""
    up: Linear
    """a, transposed."""
    b_uk: Tensor
    """[H, Dn, rank]: of what makes keys."""
    b_uv: Tensor
    """[H, rank, Dv]: of what makes values."""


class LatentAdditions:
    """The deltas of one up-projection, by adapter, for attention in absorbed form."""

    def __init__(self, rows: AdapterRows, ops: Ops) -> None:
        self._rows = rows
        self._ops = ops
        self._deltas: dict[str, LatentDelta] = {}

    def put(self, adapter: str, delta: LatentDelta | None) -> None:
        """Use the delta for this adapter from now on; None: it leaves this projection alone."""
        if delta is not None:
            self._deltas[adapter] = delta
        else:
            self._deltas.pop(adapter, None)

    @property
    def is_active(self) -> bool:
        """Whether the running forward pass has rows that it changes."""
        return any(adapter in self._deltas for adapter in self._rows.rows)

    def add_to_queries_(self, q_nope: Tensor, q_latent: Tensor) -> None:
        """q_nope: [T, H, Dn]; q_latent: [T, H, R], their products with w_uk."""
        for rows, delta in self._active():
            low = self._ops.head_matmul(q_nope[rows], delta.b_uk)  # [n, H, rank]
            q_latent[rows] += delta.up(low.flatten(0, 1)).view(len(rows), *q_latent.shape[1:])

    def add_to_values_(self, attended: Tensor, out: Tensor) -> None:
        """attended: [T, H, R]; out: [T, H, Dv], their products with w_uv."""
        for rows, delta in self._active():
            part = attended[rows]  # [n, H, R]
            low = delta.down(part.flatten(0, 1)).view(*part.shape[:2], -1)
            out[rows] += self._ops.head_matmul(low, delta.b_uv)

    def _active(self) -> Iterator[tuple[Tensor, LatentDelta]]:
        for adapter, rows in self._rows.rows.items():
            if (delta := self._deltas.get(adapter)) is not None:
                yield rows, delta
