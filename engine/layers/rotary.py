"""Rotary position embedding: the angles of every position, tabulated once."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from engine.config import RopeConfig, RopeType
from kernels.ops import Ops


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, [head_dim / 2] float32.

    Source: RoFormer (arXiv 2104.09864), section 3.2; scaling as in the functions below.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.divisors:
        inv_freq = inv_freq / torch.tensor(rope.divisors)
    return _SCALINGS[rope.rope_type](inv_freq, rope, head_dim)


def _default(inv_freq: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    return inv_freq


def _linear(inv_freq: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Stretch every wavelength by the same factor.

    Source: Position Interpolation (arXiv 2306.15595).
    """
    return inv_freq / rope.factor


def _llama3(inv_freq: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Stretch long wavelengths, keep short ones, blend in between.

    Source: apply_scaling in meta-llama/llama-models, models/llama3/model.py.
    """
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / rope.factor


def _yarn(inv_freq: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Stretch dimensions that turn rarely within the trained context, keep those that turn often.

    Source: YaRN (arXiv 2309.00071), section 3.2 and equations 17 to 19.
    """

    def dim_that_turns(times: float) -> float:
        original = rope.original_max_position_embeddings
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_that_turns(rope.beta_fast), dim_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return (1 - stretch) * inv_freq + stretch * inv_freq / rope.factor


_SCALINGS: Mapping[RopeType, Callable[[Tensor, RopeConfig, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


class RotaryEmbedding(nn.Module):
    """positions [T] -> (cos, sin), each [T, ...]: rows of the tables that the ops rotate with."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_position_embeddings: int, *, ops: Ops
    ) -> None:
        super().__init__()
        self._ops = ops
        positions = torch.arange(max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        self._cos, self._sin = ops.rotary_table(
            angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        )

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Look the angles up; positions are below max_position_embeddings."""
        embedding = self._ops.embedding
        return embedding(positions, self._cos), embedding(positions, self._sin)
