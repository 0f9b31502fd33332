"""How operators of the NPU get CPU kernels, and how these refuse what an operator would."""

from collections.abc import Callable

import torch

_library = torch.library.Library("npu", "IMPL", "CPU")


def kernel(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Register the decorated function as torch.ops.npu's `name` on CPU tensors."""

    def register(function: Callable[..., object]) -> Callable[..., object]:
        _library.impl(name, function)
        return function

    return register


def demand(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"simulated NPU: {what}")
