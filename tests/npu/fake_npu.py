"""torch.npu's streams, events and graphs on the CPU: everything is written down in one record.

A graph that is replayed runs its launches again, in order; a task group's launch is the one that
was last given to it, and runs only if its event was recorded since the graph last reset it. That is
what the device does, but for doing it at the same time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FakeStream:
    def __init__(self, npu: "FakeNpu", name: str) -> None:
        self.npu, self.name = npu, name

    def synchronize(self) -> None:
        self.npu.record.append(f"synchronize {self.name}")


class FakeEvent:
    def __init__(self, npu: "FakeNpu") -> None:
        self.npu, self.number, self.is_set = npu, npu.count("event"), False

    def wait(self, stream: FakeStream) -> None:
        self.npu.note(f"wait {self.number} on {stream.name}", self._check)

    def reset(self, stream: FakeStream) -> None:
        self.npu.note(f"reset {self.number} on {stream.name}", self._clear)

    def record(self, stream: FakeStream) -> None:
        self.npu.record.append(f"record {self.number} on {stream.name}")
        self.is_set = True

    def _check(self) -> None:
        assert self.is_set, f"event {self.number} is never recorded: the device would hang"

    def _clear(self) -> None:
        self.is_set = False


class FakeGraph:
    def __init__(self, npu: "FakeNpu") -> None:
        self.npu, self.number = npu, npu.count("graph")
        self.launches: list[Callable[[], Any]] = []

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self.npu.record.append(f"replay {self.number}")
        for launch in self.launches:
            launch()


class Group:
    """A task group: what it launches may be exchanged."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], Any]] = []

    def __call__(self) -> None:
        for launch in self.launches:
            launch()


class Recording(TorchDispatchMode):
    """Every operator that runs meanwhile is kept in the current graph or group."""

    def __init__(self, npu: "FakeNpu") -> None:
        super().__init__()
        self.npu = npu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        sink = self.npu.sink
        if sink is None:
            return out
        sink.append(lambda: self._again(func, args, kwargs, out))
        return out

    def _again(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute anew into the same memory, as the device does."""
        fresh = func(*args, **kwargs)
        for old, new in zip(_tensors(out), _tensors(fresh), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


class FakeNpu:
    """Stands in for torch.npu."""

    def __init__(self) -> None:
        self.record: list[str] = []
        self.sink: list[Callable[[], Any]] | None = None
        self._counts: dict[str, int] = {}
        self._outer: list[Callable[[], Any]] | None = None

    def count(self, what: str) -> int:
        self._counts[what] = self._counts.get(what, -1) + 1
        return self._counts[what]

    def note(self, what: str, action: Callable[[], None]) -> None:
        """Something that a capture keeps, or else happens now."""
        self.record.append(what)
        if self.sink is None:
            action()
        else:
            self.sink.append(action)

    def Stream(self) -> FakeStream:
        return FakeStream(self, f"stream {self.count('stream')}")

    def current_stream(self) -> FakeStream:
        return FakeStream(self, "current")

    def ExternalEvent(self) -> FakeEvent:
        return FakeEvent(self)

    def NPUGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def synchronize(self) -> None:
        self.record.append("synchronize")

    @contextmanager
    def graph(self, graph: FakeGraph, pool: Any, stream: FakeStream) -> Iterator[None]:
        self.record.append(f"capture {graph.number} on {stream.name}, pool {pool}")
        self.sink = graph.launches
        try:
            with Recording(self):
                yield
        finally:
            self.sink = None
        self.record.append(f"end {graph.number}")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        yield

    def graph_task_group_begin(self, stream: FakeStream) -> None:
        self.record.append("group begin")
        group = Group()
        assert self.sink is not None, "no graph is captured"
        self.sink.append(group)
        self._outer, self.sink = self.sink, group.launches
        self._group = group

    def graph_task_group_end(self, stream: FakeStream) -> Group:
        self.record.append("group end")
        self.sink = self._outer
        return self._group

    def graph_task_update_begin(self, stream: FakeStream, handle: Group) -> None:
        self.record.append(f"update begin on {stream.name}")
        handle.launches.clear()
        self.sink = handle.launches
        self._mode = Recording(self)
        self._mode.__enter__()

    def graph_task_update_end(self, stream: FakeStream) -> None:
        self._mode.__exit__(None, None, None)
        self.sink = None
        self.record.append(f"update end on {stream.name}")
