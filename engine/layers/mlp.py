"""The gated feed-forward block."""

from torch import Tensor, nn

from engine.layers.linear import FusedLinear
from kernels.ops import Ops


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Source: SwiGLU in GLU Variants Improve Transformer (arXiv 2002.05202).
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self.gate_up_proj = FusedLinear(
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            bias=bias,
            ops=ops,
        )
        self.down_proj = FusedLinear(
            intermediate_size, {"down_proj": hidden_size}, bias=bias, ops=ops
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden_size] -> [T, hidden_size]."""
        out: Tensor = self.down_proj(self._ops.silu_mul(self.gate_up_proj(x)))
        return out
