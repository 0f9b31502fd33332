"""What may be chosen of how CPUs compute; imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal

ActivationBits = Literal[8, 16]


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuOptions:
    """Choices that change no token but by rounding."""

    activation_bits: ActivationBits = 16
    """Of the inputs of products with weights in 4 bits, rounded in runs that share a scale. Weights
    in 8 bits always meet 16, those in 16 bits and more meet float32.
    """

    def input_bits(self, weight_bits: int) -> int | None:
        """Of the inputs of products with such weights; None: they stay floats."""
        return {4: self.activation_bits, 8: 16}.get(weight_bits)


DEFAULT_OPTIONS = CpuOptions()
