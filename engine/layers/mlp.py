"""The gated feed-forward block."""

from torch import Tensor, nn

from engine.layers.linear import FusedLinear
from engine.layers.rows import rows_of
from engine.parallel import Parallel
from engine.split import split_evenly
from kernels.ops import Ops


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), its width split over the tensor-parallel group.

    Source: SwiGLU in GLU Variants Improve Transformer (arXiv 2002.05202).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        ops: Ops,
        parallel: Parallel,
    ) -> None:
        super().__init__()
        self._ops = ops
        self._rows = rows_of(parallel)
        width = split_evenly("intermediate_size", intermediate_size, parallel.tp)
        self.gate_up_proj = FusedLinear(
            hidden_size, {"gate_proj": width, "up_proj": width}, bias=bias, ops=ops
        )
        self.down_proj = FusedLinear(width, {"down_proj": hidden_size}, bias=bias, ops=ops)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden_size] -> [T, hidden_size]; rows as they are between blocks."""
        hidden = self._ops.silu_mul(self._rows.gather_into(self.gate_up_proj, x))
        return self._rows.reduce_from(self.down_proj, hidden)

    def partial(self, x: Tensor) -> Tensor:
        """This rank's part of the sum, for all rows."""
        return self.down(self.up(x))

    def up(self, x: Tensor) -> Tensor:
        """The first half of `partial`: x [T, hidden_size] -> [T, width of this rank]."""
        return self._ops.silu_mul(self.gate_up_proj(x))

    def down(self, hidden: Tensor) -> Tensor:
        """The second half: what `up` returned -> [T, hidden_size]."""
        out: Tensor = self.down_proj(hidden)
        return out
