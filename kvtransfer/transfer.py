"""One outgoing transfer of one writer rank: a part for each rank of the reader that it writes."""

import threading
from collections.abc import Callable, Sequence

from kernels.device_queue import Wait
from kvtransfer.link import BlockCopy, RequestKey, TransferResult
from kvtransfer.rank_transfer import RankTransfer


class Transfer:
    """Handle that Sender.begin returns; all methods may be called from any thread.

    One part that fails takes the others down. on_done is called once, when all are over.
    """

    def __init__(
        self,
        key: RequestKey,
        num_layers: int,
        block_indices: range,
        on_done: Callable[[TransferResult], None],
        mark: Callable[[], Wait],
    ):
        """mark: see KVMemory."""
        self.key = key
        self.block_indices = block_indices
        """Numbers of the writer's blocks of the prompt that have to be pushed."""
        self._num_layers = num_layers
        self._on_done = on_done
        self._mark = mark
        self._lock = threading.Lock()
        self._parts: tuple[RankTransfer, ...] = ()
        self._results: list[TransferResult] = []
        self._is_over = False

    def start(self, parts: Sequence[RankTransfer]) -> None:
        """Give it its parts, before any of them can be done."""
        self._parts = tuple(parts)

    @property
    def num_bytes(self) -> int:
        """Written so far, counted by the transport."""
        return sum(part.num_bytes for part in self._parts)

    def push(
        self, layer_idx: int, blocks: Sequence[BlockCopy], wait_computed: Wait | None = None
    ) -> None:
        """Queue copies of one layer's blocks; return at once. The calling thread must have launched
        what computes them, which is waited for elsewhere; they stay unchanged until on_done.

        wait_computed: of a mark that was set since; None: one is set for this push.
        A block pushed again replaces what was pushed before. After an abort this does nothing.
        Raises: ValueError: no such layer, or a block that the reader did not ask for.
        """
        if not 0 <= layer_idx < self._num_layers:
            raise ValueError(f"layer_idx is {layer_idx}, the model has {self._num_layers}")
        for _, block_index in blocks:
            if block_index not in self.block_indices:
                raise ValueError(
                    f"block_index is {block_index}, the reader takes {self.block_indices}"
                )
        wait_computed = wait_computed or self._mark()
        for part in self._parts:
            part.push(layer_idx, blocks, wait_computed)

    def finish(self) -> None:
        """State that nothing more will be pushed. on_done follows when all of it is written."""
        for part in self._parts:
            part.finish()
        if not self._parts:
            self._conclude("")

    def abort(self, reason: str) -> None:
        """Stop writing. on_done follows once nothing is in flight; after it, this does nothing."""
        for part in self._parts:
            part.abort(reason)
        if not self._parts:
            self._conclude(reason or "aborted")

    def withdraw(self, reason: str) -> None:
        """Like abort, for a transfer that nobody needs any more: no failure is counted."""
        for part in self._parts:
            part.withdraw(reason)
        if not self._parts:
            self._conclude(reason or "withdrawn")

    def on_part_done(self, result: TransferResult) -> None:
        """A part is over; called by the thread of its link."""
        with self._lock:
            self._results.append(result)
            is_over = len(self._results) == len(self._parts)
        if is_over:
            errors = [result.error for result in self._results if not result.ok]
            self._conclude(errors[0] if errors else "")
        elif not result.ok:
            for part in self._parts:
                part.abort(result.error)

    def _conclude(self, error: str) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        num_blocks = min((result.num_blocks for result in self._results), default=0)
        self._on_done(TransferResult(self.key, not error, error, self.num_bytes, num_blocks))
