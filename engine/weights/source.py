"""Where weights come from, as the loader sees it: named tensors that are read one at a time."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a checkpoint under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """The values, in any floating type; may be called from any thread."""
