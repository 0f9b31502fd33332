"""Two streams in one graph that TorchAir compiles: work that does not wait for the other's.

There is one side stream, and no communication on it: the order of collectives would no longer be
that of the other ranks. Outside of a compiled graph all of this does nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

SIDE_STREAM = "side"
MAX_PREFETCH_BYTES = 18 << 20
"""Of one weight: more would push out of the cache what attention reads meanwhile."""


@contextmanager
def on_side_stream(is_wanted: bool = True) -> Iterator[None]:
    """Nodes that are traced meanwhile carry the label of the side stream."""
    if not (is_wanted and torch.compiler.is_compiling()):
        yield
        return
    keys = ["_user_stream_label", "_user_stream_priority", "_enable_inner_parallel"]
    torch.ops.air.scope_enter(keys, [SIDE_STREAM, "0", "True"])
    yield
    torch.ops.air.scope_exit()


def after(x: Tensor, dependency: Tensor, is_wanted: bool = True) -> Tensor:
    """x, not to be used before `dependency` is there; an edge between streams, not of data."""
    if not (is_wanted and torch.compiler.is_compiling()):
        return x
    out: Tensor = torch.ops.air.wait_tensor(x, dependency)
    return out


def prefetch(weight: Tensor, dependency: Tensor) -> None:
    """Begin to bring a weight to the cache once `dependency` is there; in compiled graphs alone.

    Outside of them it would be one launch among others on the same stream, and wait for them.
    """
    if torch.compiler.is_compiling():
        num_bytes = weight.numel() * weight.element_size()
        torch.ops.npu.npu_prefetch(weight, dependency, min(num_bytes, MAX_PREFETCH_BYTES))
