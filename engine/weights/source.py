"""Where weights come from, as the loader sees it: named tensors that are read one at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a checkpoint under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """The values, in any floating type; may be called from any thread."""
    read_part: Callable[[Sequence[slice]], Tensor] | None = None
    """As `read`, of one slice per dim, without reading the rest; None where that is impossible."""

    read_quantized: Callable[[], QuantizedWeight] | None = None
    """The values as the checkpoint holds them, in few bits; None where it does not."""

    def part(self, index: Sequence[slice]) -> Tensor:
        """The values of one slice per dim."""
        if self.read_part is not None:
            return self.read_part(index)
        return self.read()[tuple(index)]
