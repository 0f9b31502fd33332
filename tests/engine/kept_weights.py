"""Two models of the same numbers, in one of which weights are held in few bits."""

import torch
from torch import Tensor

from engine.layers.embedding import LMHead
from engine.layers.linear import FusedLinear
from engine.models import CausalLM
from kernels.cpu.options import ActivationBits, CpuOptions
from kernels.ops import Ops, select_ops


def with_8_bits() -> Ops:
    """CPU operations as a service has them by default: what meets 4-bit weights has 8 bits."""
    return select_ops("cpu", cpu=CpuOptions(activation_bits=8))


def assert_same_weights(kept: CausalLM, plain: CausalLM) -> None:
    """All rows of all projections, bit by bit."""
    layers = [
        [layer for layer in model.modules() if isinstance(layer, FusedLinear | LMHead)]
        for model in (kept, plain)
    ]
    assert layers[0]
    for ours, theirs in zip(*layers, strict=True):
        ids = torch.arange(ours._linear.out_features)
        assert torch.equal(ours._linear.rows(ids), theirs._linear.rows(ids))


def assert_close_but_for_inputs(
    kept: Tensor, plain: Tensor, *, bits: ActivationBits = 16, quantile: float = 1.0
) -> None:
    """Logits [T, V] of products whose inputs are rounded to so many bits, and of float ones.

    Each row's error, root mean square over that of its logits. A step is the largest of 32 or 64
    neighbours, 2.4 times their root mean square if they are normal, over 2^(bits - 1) - 1; rounding
    errs by 1 / sqrt(12) of it, and a product passes the share on whatever its length is. The nine
    products in a row of two layers and a vocabulary add up by chance, to sqrt(9) of that: 6e-5 with
    16 bits, 1.6e-2 with 8. What gates let through has larger peaks, and norms and softmax amplify:
    3.3 times as much was seen in the worst row, 6 times is allowed. Thirty layers do not err more,
    since each adds little to what the layers before it gave.

    quantile: the share of rows that this holds for.
    """
    step = 2.4 / (2 ** (bits - 1) - 1)
    tolerance = 6 * 9**0.5 * step / 12**0.5
    error = (kept - plain).square().mean(dim=1).sqrt() / plain.square().mean(dim=1).sqrt()
    assert float(error.quantile(quantile)) < tolerance


def assert_inputs_are_rounded(kept: Tensor, plain: Tensor, *, bits: ActivationBits) -> None:
    """Logits [T, V] err by no less than a single product does with inputs of so many bits."""
    error = (kept - plain).square().mean().sqrt() / plain.square().mean().sqrt()
    assert float(error) > 2.4 / (2 ** (bits - 1) - 1) / 12**0.5
