"""Two models of the same numbers, in one of which weights are held in few bits."""

import torch
from torch import Tensor

from engine.layers.embedding import LMHead
from engine.layers.linear import FusedLinear
from engine.models import CausalLM


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


def assert_close_but_for_inputs(kept: Tensor, plain: Tensor) -> None:
    """Logits [T, V] of products whose inputs are rounded to 16 bits, and of float ones.

    A step is 2^-15 of the largest of 64 neighbours, at worst. Each product, some ten in a row here,
    adds what is left of that by chance: 1e-3 of the logits' size is a few times what was seen.
    """
    torch.testing.assert_close(kept, plain, rtol=0, atol=1e-3 * float(plain.abs().max()))
