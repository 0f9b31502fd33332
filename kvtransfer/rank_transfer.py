"""The part of an outgoing transfer that goes to one rank of the reader: what is still to be
written, how far it is, and whether it may go on.

    OPENING --grant--> GRANTED --finish and all written--> concluded ok
       |                  |
       +------------------+--abort, deadline, error------> concluded with an error

The engine thread pushes; the thread of the link takes batches, writes them and concludes.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kernels.device_queue import Wait
from kvtransfer.checksum import sum_checksums
from kvtransfer.config import KVTransferConfig
from kvtransfer.layout import KVLayout
from kvtransfer.link import BlockCopy, RequestKey, TransferResult
from kvtransfer.reshard import Placement


class Push(NamedTuple):
    """Blocks of one layer."""

    layer_idx: int
    copies: tuple[BlockCopy, ...]
    wait_computed: Wait
    """Until the device has computed them."""


class RankTransfer:
    """push, finish and abort may be called from any thread and return at once."""

    def __init__(
        self,
        key: RequestKey,
        placement: Placement,
        block_indices: range,
        layout: KVLayout,
        config: KVTransferConfig,
        on_done: Callable[[TransferResult], None],
        wake: Callable[[], None],
    ):
        self.key = key
        self.placement = placement
        self.num_bytes = 0
        self.is_begun = False
        """Whether the reader was asked for a grant and so has to be told the end."""
        self.is_unanswered = False
        """Whether it failed because the reader neither granted nor refused it."""
        self.is_withdrawn = False
        """Whether it ended because nobody needs it."""
        self.block_indices = block_indices
        self._config = config
        self._on_done = on_done
        self._wake = wake
        self._lock = threading.Lock()
        self._pushes: deque[Push] = deque()
        self._is_granted = False
        self._is_finished = False
        self._is_concluded = False
        self._error = ""
        self._failed_s = float("inf")
        self._progress_s = time.monotonic()
        self._finish_s = 0.0
        self._checksums: list[dict[int, int]] = [{} for _ in range(layout.num_layers)]
        self._is_reported = [False] * layout.num_layers
        self._unreported: list[int] = []
        layer_bytes = layout.block_bytes_all_layers // layout.num_layers
        self._copies_per_push = max(1, config.max_batch_bytes // layer_bytes)
        self._copies_per_batch = max(1, config.min_batch_bytes // layer_bytes)
        self._num_queued = 0
        self._pushed_layer_bytes = len(block_indices) * layer_bytes

    def push(self, layer_idx: int, blocks: Sequence[BlockCopy], wait_computed: Wait) -> None:
        """Queue copies of one layer's blocks, see Transfer.push; wait_computed: see Push."""
        step = self._copies_per_push
        with self._lock:
            if self._error or self._is_concluded:
                return
            assert not self._is_finished, "push after finish"
            was_due = self._is_due()
            for start in range(0, len(blocks), step):
                copies = tuple(blocks[start : start + step])
                self._pushes.append(Push(layer_idx, copies, wait_computed))
            self._num_queued += len(blocks)
            is_due = self._is_due()
            if is_due and not was_due and self._is_granted:
                self._progress_s = time.monotonic()
        if is_due:
            self._wake()

    def finish(self) -> None:
        """State that nothing more will be pushed. on_done follows when all of it is written."""
        with self._lock:
            if self._is_finished:
                return
            was_due = self._is_due()
            self._is_finished = True
            self._finish_s = time.monotonic()
            if not was_due and self._is_granted:
                self._progress_s = self._finish_s
        self._wake()

    def abort(self, reason: str) -> None:
        """Stop writing. on_done follows once nothing is in flight; after it, this does nothing."""
        self.fail(reason)
        self._wake()

    def withdraw(self, reason: str) -> None:
        """Like abort, but not counted as a failure, on either side."""
        self.fail(reason, withdrawn=True)
        self._wake()

    def fail(self, reason: str, *, withdrawn: bool = False) -> None:
        """Record the first reason why this transfer cannot succeed, and drop what is queued."""
        with self._lock:
            if not self._error:
                self._error, self.is_withdrawn = reason or "aborted", withdrawn
                self._failed_s = time.monotonic()
            self._drop_pushes()

    def grant(self) -> None:
        """The reader lets this transfer write."""
        with self._lock:
            self._is_granted = True
            self._progress_s = time.monotonic()

    def take_batch(self) -> list[Push]:
        """Take the next pushes to write, up to max_batch_bytes; empty if there is nothing now, or
        less than min_batch_bytes while more is to come.
        """
        batch: list[Push] = []
        num_copies = 0
        with self._lock:
            if not (self._is_granted and self._is_due()):
                return batch
            while self._pushes:
                num_copies += len(self._pushes[0].copies)
                if batch and num_copies > self._copies_per_push:
                    break
                batch.append(self._pushes.popleft())
                self._num_queued -= len(batch[-1].copies)
        return batch

    def record_batch(self, batch: Sequence[Push], checksums: Sequence[int], num_bytes: int) -> None:
        """The batch was written; checksums holds one per copy, in order."""
        iterator = iter(checksums)
        for layer_idx, copies, _ in batch:
            layer = self._checksums[layer_idx]
            for copy in copies:
                layer[copy.block_index] = next(iterator)
            if len(layer) == len(self.block_indices) and not self._is_reported[layer_idx]:
                self._is_reported[layer_idx] = True
                self._unreported.append(layer_idx)
        self.num_bytes += num_bytes
        with self._lock:
            self._progress_s = time.monotonic()

    def take_report(self, checksum_every: int) -> list[tuple[int, int]]:
        """(layer_idx, checksum) of layers that the reader may verify, once there are enough, of
        which it hashes one run in so many.
        """
        hashed_bytes = len(self._unreported) * self._pushed_layer_bytes // checksum_every
        if hashed_bytes < self._config.report_bytes:
            return []
        layers, self._unreported = self._unreported, []
        return [(idx, sum_checksums(self._checksums[idx].values())) for idx in layers]

    def is_complete(self) -> bool:
        """Whether the caller finished and nothing is left to write."""
        with self._lock:
            return self._is_granted and self._is_finished and not self._pushes

    def is_ready(self) -> bool:
        """Whether the thread of the link has something to do for this transfer, deadlines aside."""
        with self._lock:
            return bool(self._error) or (self._is_granted and (self._is_due() or self._is_finished))

    def find_error(self) -> str:
        """Why this transfer has to end without success; empty while it may go on."""
        with self._lock:
            if not self._error and time.monotonic() > self._deadline_s():
                what = "grant" if not self._is_granted else "write"
                self.is_unanswered = self.is_begun and not self._is_granted
                self._error = f"deadline passed while waiting for a {what}"
                self._drop_pushes()
            return self._error

    def write_deadline_s(self, start_s: float) -> float:
        """By when a write that began at start_s has to be through, on time.monotonic()."""
        config = self._config
        return min(start_s + config.progress_timeout_s, self._failed_s + config.abort_patience_s)

    def deadline_s(self) -> float:
        """When find_error has to be asked again, on time.monotonic()."""
        with self._lock:
            return self._deadline_s()

    def missing_blocks(self) -> str:
        """What was not pushed; empty if every layer of every block was."""
        expected = len(self.block_indices)
        for layer_idx, layer in enumerate(self._checksums):
            if len(layer) != expected:
                return f"layer {layer_idx}: {len(layer)} of {expected} blocks were pushed"
        return ""

    def layer_checksums(self) -> list[int]:
        """One per layer, see checksum.py."""
        return [sum_checksums(layer.values()) for layer in self._checksums]

    def conclude(self, error: str) -> None:
        """Call on_done.

        Called once, by the thread of the link.
        """
        with self._lock:
            assert not self._is_concluded, f"{self.key} concluded twice"
            self._is_concluded = True
            self._drop_pushes()
        num_blocks = min(len(layer) for layer in self._checksums)
        self._on_done(TransferResult(self.key, not error, error, self.num_bytes, num_blocks))

    def _is_due(self) -> bool:
        """Whether what is queued is worth a batch. The lock is held."""
        is_worth_it = self._is_finished or self._num_queued >= self._copies_per_batch
        return bool(self._pushes) and is_worth_it

    def _drop_pushes(self) -> None:
        self._pushes.clear()
        self._num_queued = 0

    def _deadline_s(self) -> float:
        has_work = not self._is_granted or self._is_due() or self._is_finished
        deadline_s = float("inf")
        if has_work:
            deadline_s = self._progress_s + self._config.progress_timeout_s
        if self._is_finished:
            deadline_s = min(deadline_s, self._finish_s + self._config.transfer_timeout_s)
        return deadline_s
