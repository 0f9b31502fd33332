"""Graphs of the C++ kernels: the ops of one forward pass, run again without Python.

Capturing runs the model's Python once while the kernels record instead of computing, so it takes
milliseconds and needs no cache on disk. Any other op of torch would be missing from the replay, and
ends the capture.

Collectives are not kernels, so with several ranks a graph has pieces:

    kernels of the first block | all_reduce by gloo | kernels of the next block | all_reduce ...
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from engine.batch import Batch, KVBatch
from engine.collectives import Run, Tape
from kernels.graph import CaptureError

# (up to this size, a graph for every so many). A padded row costs as much as a real one, so at most
# one in nine is.
_STEPS = ((16, 1), (32, 2), (64, 4), (128, 8), (256, 16), (512, 32))
_QUESTIONS = frozenset({"__get__", "__len__", "dim", "numel", "size", "stride"})


class NativeBackend:
    """Implements `decoder.graph.GraphBackend`."""

    name = "native"
    has_host_lengths = False
    takes_drafts = True

    def __init__(self, tape: Tape | None = None, *, multiple_of: int = 1) -> None:
        """tape: of the model's groups. multiple_of: what sizes are multiples of."""
        self._tape = tape or Tape()
        self._multiple_of = multiple_of
        self._graphs = torch.classes.pdserve_cpu.Graphs()
        self.num_compiles = 0
        self._numbers: dict[int, int] = {}
        self._num_calls = 0

    @property
    def num_bytes(self) -> int:
        """Of their tasks, and of the intermediate results, which they share."""
        num_bytes: int = self._graphs.num_bytes()
        return num_bytes

    def batch_sizes(self, max_num_rows: int) -> Sequence[int]:
        """Every small size, then ever fewer; the last one holds max_num_rows, up to 512."""
        sizes: list[int] = []
        for until, step in _STEPS:
            start = sizes[-1] if sizes else 0
            sizes += range(start + step, until + 1, step)
        unit = self._multiple_of
        return sorted({-(-s // unit) * unit for s in sizes[: bisect_left(sizes, max_num_rows) + 1]})

    def capture(
        self,
        forward: Callable[[Tensor, Tensor, KVBatch], Tensor],
        batch: Batch,
        agree: Callable[[], None],
    ) -> Callable[[], Tensor]:
        """See `GraphBackend.capture`; nothing is computed."""
        # Watching every op is slow; sizes differ in nothing but a number.
        is_first = self.num_compiles == 0
        pieces = _Pieces(self._graphs)
        self._graphs.begin()
        self._tape.recorder = pieces
        try:
            with _OnlyRecordedOps(pieces) if is_first else nullcontext():
                hidden = forward(batch.input_ids, batch.positions, batch.kv)
        except BaseException:
            self._graphs.cancel()
            raise
        finally:
            self._tape.recorder = None
        number = self._graphs.end()
        self.num_compiles += 1
        self._numbers[len(batch.input_ids)] = number
        num_tasks, num_calls = self._graphs.num_tasks(number), len(pieces.calls)
        if is_first:
            self._num_calls = num_calls
        if (num_tasks, num_calls) != (self._graphs.num_tasks(0), self._num_calls):
            raise CaptureError(f"a batch of {len(batch.input_ids)} takes other ops than the first")
        agree()

        def replay() -> Tensor:
            pieces.replay(number, num_tasks)
            return hidden

        return replay

    def profile(self, size: int) -> list[tuple[str, float]]:
        """Replay the graph of a captured batch size: each kernel's C++ name and its seconds."""
        times: list[tuple[str, float]] = self._graphs.profile(self._numbers[size])
        return times


@dataclass(slots=True)
class _Pieces:
    """Implements engine.collectives.Recorder: what is called between the kernels of one graph."""

    graphs: Any
    calls: list[tuple[int, Run, Tensor, Tensor]] = field(default_factory=list)
    """(kernels before it, what, its two tensors)."""

    @property
    def num_recorded(self) -> int:
        """Kernels and calls so far."""
        num_kernels: int = self.graphs.num_recorded()
        return num_kernels + len(self.calls)

    def empty(self, sizes: Sequence[int], like: Tensor) -> Tensor:
        """See Recorder."""
        out: Tensor = self.graphs.empty(list(sizes), like)
        return out

    def call(self, run: Run, out: Tensor, x: Tensor) -> None:
        """See Recorder."""
        # NOTE: a tensor that is kept would keep its memory from later kernels.
        tensors = (self.graphs.alias(out), self.graphs.alias(x))
        self.calls.append((self.graphs.num_recorded(), run, *tensors))

    def replay(self, number: int, num_tasks: int) -> None:
        """Run it all, in order."""
        start = 0
        for stop, run, out, x in self.calls:
            self.graphs.replay(number, start, stop)
            run(out, x)
            start = stop
        self.graphs.replay(number, start, num_tasks)


class _OnlyRecordedOps(TorchFunctionMode):
    """Refuses what would compute now, and so not in a replay.

    NOTE: not a TorchDispatchMode: the first use of one loads all of torch's compiler.
    """

    def __init__(self, pieces: _Pieces) -> None:
        super().__init__()
        self._pieces = pieces

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        num_recorded = self._pieces.num_recorded
        result = func(*args, **(kwargs or {}))
        if self._pieces.num_recorded == num_recorded and not _only_looks(func, args, result):
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
