"""A second thread of a rank, for what may be computed while the first one waits for others."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class SideThread:
    """Computes one thing after another. No collectives: their order would be anybody's guess."""

    def __init__(self, num_threads: int) -> None:
        """num_threads: of an operation, as torch.set_num_threads counts them."""
        self._pool = ThreadPoolExecutor(
            1, "side", initializer=torch.set_num_threads, initargs=(num_threads,)
        )

    def start(self, compute: Callable[[], Tensor]) -> "Future[Tensor]":
        """Begin, and return at once; ask the result for its value when it is needed."""
        is_inference = torch.is_inference_mode_enabled()

        def run() -> Tensor:
            with torch.inference_mode(is_inference):
                return compute()

        return self._pool.submit(run)
