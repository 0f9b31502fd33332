"""How a worker holds weights and multiplies with them, and what its KV is called by that."""

from engine.config import Quantization
from kernels.ops import Ops

_WEIGHT_BITS = {"int4": (4,), "int8": (8,), "auto": (4, 8), "native": (4, 8)}
"""That products may have, those with the vocabulary left out: no KV comes from them."""


def quantization_of(asked: Quantization, ops: Ops) -> Quantization:
    """How weights are loaded: `auto` keeps few bits for the CPU's kernels alone."""
    return "none" if asked == "auto" and ops.name != "cpu" else asked


def weights_name(asked: Quantization, ops: Ops) -> str:
    """Where it differs, KV does.

    NOTE: the bits of activations are in it although all CPU kernels round them: before they did,
    KV that tiers still hold was named by the quantisation alone.
    """
    held = quantization_of(asked, ops)
    found = [ops.input_bits(bits) for bits in _WEIGHT_BITS.get(held, ())]
    rounded = sorted({bits for bits in found if bits is not None})
    name = "native" if held == "auto" else held
    return f"{name}, activations of {' and '.join(map(str, rounded))}" if rounded else name
