"""Memory for weights that are filled, packed and dropped."""

import mmap
from math import prod

import torch
from torch import Tensor

_SMALL_BYTES = 1 << 16


def empty_weight(*shape: int) -> Tensor:
    """float32, with pages that are there once written, and gone with the tensor.

    NOTE: not the allocator's. What it takes back it hands out again, and pages that nobody had
    touched would come to life beside others that are free.
    """
    num_bytes, default = 4 * prod(shape), torch.empty(0)
    # Modes of torch that make other tensors, without contents, get those.
    is_plain = type(default) is Tensor and default.device.type == "cpu"
    if num_bytes < _SMALL_BYTES or not is_plain:
        return torch.empty(shape)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)
