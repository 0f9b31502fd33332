"""Graphs of the C++ kernels: the ops of one forward pass, run again without Python.

Capturing runs the model's Python once while the kernels record instead of computing, so it takes
milliseconds and needs no cache on disk. Any other op of torch would be missing from the replay, and
ends the capture.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from engine.batch import Batch, KVBatch
from kernels.graph import CaptureError

# (up to this size, a graph for every so many). A padded row costs as much as a real one, so at most
# one in 16 is.
_STEPS = ((16, 1), (32, 2), (64, 4), (512, 32))
_QUESTIONS = frozenset({"__get__", "__len__", "dim", "numel", "size", "stride"})


class NativeBackend:
    """Implements `decoder.graph.GraphBackend`."""

    name = "native"
    has_host_lengths = False

    def __init__(self) -> None:
        self._graphs = torch.classes.pdserve_cpu.Graphs()
        self.num_compiles = 0
        self._numbers: dict[int, int] = {}

    def batch_sizes(self, max_num_seqs: int) -> Sequence[int]:
        """Every small size, then ever fewer; the last one holds max_num_seqs, up to 512."""
        sizes: list[int] = []
        for until, step in _STEPS:
            start = sizes[-1] if sizes else 0
            sizes += range(start + step, until + 1, step)
        return sizes[: bisect_left(sizes, max_num_seqs) + 1]

    def capture(
        self, forward: Callable[[Tensor, Tensor, KVBatch], Tensor], batch: Batch
    ) -> Callable[[], Tensor]:
        """See `GraphBackend.capture`."""
        # Watching every op is slow; sizes differ in nothing but a number.
        is_first = self.num_compiles == 0
        self._graphs.begin()
        try:
            with _OnlyRecordedOps(self._graphs) if is_first else nullcontext():
                hidden = forward(batch.input_ids, batch.positions, batch.kv)
        except BaseException:
            self._graphs.cancel()
            raise
        graphs, number = self._graphs, self._graphs.end()
        self.num_compiles += 1
        self._numbers[len(batch.input_ids)] = number
        if graphs.num_tasks(number) != graphs.num_tasks(0):
            raise CaptureError(f"a batch of {len(batch.input_ids)} takes other ops than the first")

        def replay() -> Tensor:
            graphs.replay(number)
            return hidden

        return replay

    def profile(self, size: int) -> list[tuple[str, float]]:
        """Replay the graph of a captured batch size: each kernel's C++ name and its seconds."""
        times: list[tuple[str, float]] = self._graphs.profile(self._numbers[size])
        return times


class _OnlyRecordedOps(TorchFunctionMode):
    """Refuses what would compute now, and so not in a replay.

    NOTE: not a TorchDispatchMode: the first use of one loads all of torch's compiler.
    """

    def __init__(self, graphs: Any) -> None:
        super().__init__()
        self._graphs = graphs

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        num_recorded = self._graphs.num_recorded()
        result = func(*args, **(kwargs or {}))
        if self._graphs.num_recorded() == num_recorded and not _only_looks(func, args, result):
            name = resolve_name(func) or str(func)
            raise CaptureError(f"{name} is not one of the kernels that can be recorded")
        return result


def _only_looks(func: Any, args: tuple[object, ...], result: object) -> bool:
    """Whether a call only looked at its arguments' memory, or asked for a shape."""
    name: str = func.__name__
    results = result if isinstance(result, tuple | list) else [result]
    views = [part for part in results if isinstance(part, Tensor)]
    if not views:
        return name in _QUESTIONS
    is_in_place = name.endswith("_") and not name.endswith("__")
    memory = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    return not is_in_place and all(v.untyped_storage().data_ptr() in memory for v in views)
