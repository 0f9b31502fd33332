"""How many threads of their own the kernels compute on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

COUNTS = (1, 2, 3)


@contextmanager
def computing_with(num_threads: int) -> Iterator[None]:
    """Within, so many, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
