"""Collective operations over one group of ranks, counted.

A group is an object that a layer is given; whoever is alone has a `SingleGroup`, which returns what
it gets. Tensors are [rows, ...]; gather and scatter are along dim 0, by rank.

Bytes are those that one rank sends: the payload for the others in an all-to-all, and what a ring
sends in the rest, with n bytes and p ranks: all_reduce 2 n (p - 1) / p; reduce_scatter and
all_gather n (p - 1) / p, where n is the size of the whole; broadcast and send n.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.turns import Pending, Turns
from kernels.graph import CaptureError

Counts = dict[str, tuple[int, int]]
"""(calls, bytes) by kind."""


_MAX_PROBLEM_BYTES = 400


@dataclass(slots=True)
class CollectiveCount:
    """How often one kind ran, and what this rank sent in all."""

    calls: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class CollectiveCounters:
    """Totals of one process by "group.kind", such as tp.all_reduce; written by its engine loop."""

    by_kind: dict[str, CollectiveCount] = field(default_factory=dict)
    num_calls: int = 0

    def add(self, kind: str, num_bytes: int) -> None:
        """Count one call."""
        self.num_calls += 1
        count = self.by_kind.setdefault(kind, CollectiveCount())
        count.calls += 1
        count.num_bytes += num_bytes

    def add_all(self, counts: Counts) -> None:
        """Count what a graph has run."""
        for kind, (calls, num_bytes) in counts.items():
            self.num_calls += calls
            count = self.by_kind.setdefault(kind, CollectiveCount())
            count.calls += calls
            count.num_bytes += num_bytes

    @contextmanager
    def aside(self) -> Iterator[Counts]:
        """Count what happens meanwhile for itself, in what is yielded and filled at the end."""
        totals, self.by_kind = self.by_kind, {}
        num_calls = self.num_calls
        found: Counts = {}
        try:
            yield found
        finally:
            found.update(self.snapshot())
            self.by_kind, self.num_calls = totals, num_calls

    def snapshot(self) -> Counts:
        """(calls, bytes) of every kind so far."""
        # NOTE: copied in one step, for a reader on another thread.
        return {kind: (c.calls, c.num_bytes) for kind, c in list(self.by_kind.items())}


def since(now: Counts, before: Counts) -> Counts:
    """What was counted between two snapshots; kinds without a call are left out."""
    difference = {}
    for kind, (calls, num_bytes) in now.items():
        old_calls, old_bytes = before.get(kind, (0, 0))
        if calls != old_calls:
            difference[kind] = (calls - old_calls, num_bytes - old_bytes)
    return difference


Run = Callable[[Tensor, Tensor], object]
"""run(out, x): fills out, which may be x."""


class Recorder(Protocol):
    """A capture of what the host's kernels compute, which collectives are no part of."""

    def empty(self, sizes: Sequence[int], like: Tensor) -> Tensor:
        """Memory of the graph, in the dtype of `like`."""
        ...

    def call(self, run: Run, out: Tensor, x: Tensor) -> None:
        """Run this at this place of every replay, and not now."""
        ...


@dataclass(slots=True)
class Tape:
    """Where what is done between a graph's kernels goes while one is captured; of a process."""

    recorder: Recorder | None = None
    """None: nothing is captured, or by somebody who sees collectives himself."""

    def between(
        self, run: Callable[[Tensor], Tensor], x: Tensor, sizes: Sequence[int], like: Tensor
    ) -> Tensor:
        """run(x), which is of these sizes and of the dtype of `like`, and no kernel of a graph."""
        if self.recorder is None:
            return run(x)
        out = self.recorder.empty(sizes, like)
        self.recorder.call(lambda out, x: out.copy_(run(x)), out, x)
        return out


class Group(Protocol):
    """Ranks that compute together; every one of them makes the same calls in the same order."""

    rank: int
    """Of this process, within the group."""
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks. May overwrite x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] -> [size * n, ...]; n is the same on all ranks."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size * n, ...] -> [n, ...]: this rank's rows of the sum."""
        ...

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows of x, sent[i] of them to rank i -> received[i] rows from rank i, both in order."""
        ...

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """x of rank `source`, in place; shape and dtype are the same on all ranks."""
        ...


class SingleGroup:
    """A rank by itself: every operation returns its input."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """x."""
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """x."""
        return x


class ProcessGroup:
    """Ranks in processes of their own, by torch.distributed: gloo, or HCCL on Ascend.

    Every call raises RuntimeError when a peer is gone or does not come within the group's time-out.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        counters: CollectiveCounters,
        turns: Turns | None = None,
        tape: Tape | None = None,
    ) -> None:
        """turns: while two computations share them, one goes on when the other waits here.
        tape: on which it is written down what is to be done while a graph is captured.
        """
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._name = name
        self._group = group
        self._counters = counters
        self._turns = turns
        self._tape = tape or Tape()

    @property
    def communicator(self) -> str:
        """HCCL's name of the group, for operators that communicate themselves.

        Raises: RuntimeError: it is not a group of HCCL's.
        """
        # NOTE: torch_npu documents this way and no public one.
        backend: Any = self._group._get_backend(torch.device("npu"))
        name: str = backend.get_hccl_comm_name(dist.get_rank())
        return name

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Group; overwrites x if it is contiguous."""
        x = x.contiguous()

        def run(out: Tensor, _: Tensor) -> None:
            self._count("all_reduce", 2 * _size(out) * (self.size - 1) // self.size)
            self._finish(dist.all_reduce(out, group=self._group, async_op=self._goes_on))

        return self._do(run, x, x)

    def all_gather(self, x: Tensor) -> Tensor:
        """See Group."""

        def run(out: Tensor, x: Tensor) -> None:
            self._count("all_gather", _size(x) * (self.size - 1))
            self._finish(dist.all_gather_single(out, x, group=self._group, async_op=self._goes_on))

        return self._do(run, self._empty(self.size * x.shape[0], x), x.contiguous())

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See Group."""

        def run(out: Tensor, x: Tensor) -> None:
            self._count("reduce_scatter", _size(out) * (self.size - 1))
            work = dist.reduce_scatter_single(out, x, group=self._group, async_op=self._goes_on)
            self._finish(work)

        return self._do(run, self._empty(x.shape[0] // self.size, x), x.contiguous())

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """See Group."""
        self._refuse_capture("all_to_all")
        x, out = x.contiguous(), x.new_empty(sum(received), *x.shape[1:])
        row_bytes = x[:1].numel() * x.element_size() if len(x) else 0
        self._count("all_to_all", (len(x) - sent[self.rank]) * row_bytes)
        sizes = list(received), list(sent)
        self._finish(
            dist.all_to_all_single(out, x, *sizes, group=self._group, async_op=self._goes_on)
        )
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """See Group; x is contiguous."""
        self._refuse_capture("broadcast")
        self._count("broadcast", _size(x) if source == self.rank else 0)
        self._finish(dist.broadcast(x, group=self._group, group_src=source, async_op=self._goes_on))
        return x

    def start_broadcast(self, x: Tensor, source: int) -> Pending:
        """As `broadcast`; x must stay as it is until the end is waited for."""
        self._refuse_capture("broadcast")
        self._count("broadcast", _size(x) if source == self.rank else 0)
        work: Pending | None = dist.broadcast(x, group=self._group, group_src=source, async_op=True)
        assert work is not None, "this rank is in the group"
        return work

    def start_send(self, x: Tensor, target: int) -> Pending:
        """Send x, which is contiguous, to rank `target` of the group; it must stay as it is until
        the end is waited for.
        """
        self._refuse_capture("send")
        self._count("send", _size(x))
        work: Pending | None = dist.isend(x, group=self._group, group_dst=target)
        assert work is not None, "this rank is in the group"
        return work

    def start_receive(self, out: Tensor, source: int) -> Pending:
        """Receive what rank `source` sends next into `out`, which has its shape and dtype."""
        self._count("receive", 0)
        work: Pending | None = dist.irecv(out, group=self._group, group_src=source)
        assert work is not None, "this rank is in the group"
        return work

    def _do(self, run: Run, out: Tensor, x: Tensor) -> Tensor:
        if (recorder := self._tape.recorder) is None:
            run(out, x)
        else:
            recorder.call(run, out, x)
        return out

    def _empty(self, num_rows: int, like: Tensor) -> Tensor:
        if (recorder := self._tape.recorder) is None:
            return like.new_empty(num_rows, *like.shape[1:])
        return recorder.empty((num_rows, *like.shape[1:]), like)

    def _refuse_capture(self, kind: str) -> None:
        if self._tape.recorder is not None:
            raise CaptureError(f"{self._name}.{kind} cannot be done between a graph's kernels")

    @property
    def _goes_on(self) -> bool:
        return self._turns is not None and self._turns.are_shared

    def _finish(self, work: Pending | None) -> None:
        """NOTE: the caller keeps what it sends until this returns."""
        if work is not None:
            assert self._turns is not None, "it would be done"
            self._turns.wait(work)

    def _count(self, kind: str, num_bytes: int) -> None:
        # NOTE: what is traced is not run; whoever runs the graph counts it.
        if not torch.compiler.is_compiling():
            self._counters.add(f"{self._name}.{kind}", num_bytes)


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def max_over(group: Group, values: Sequence[int]) -> list[int]:
    """The largest of each number over the ranks of a group, which meet on the host for it."""
    if group.size == 1:
        return list(values)
    gathered = group.all_gather(torch.tensor([list(values)], dtype=torch.int64))
    return [int(v) for v in gathered.max(dim=0).values]


def first_problem(group: Group, problem: str) -> str:
    """What the first rank of the group with a problem has, and which; empty: none has one.

    Every rank calls it, with its own problem or an empty text.
    """
    if group.size == 1:
        return problem
    text = problem.encode()[:_MAX_PROBLEM_BYTES]
    (longest,) = max_over(group, [len(text)])
    if not longest:
        return ""
    padded = torch.zeros(1, longest, dtype=torch.uint8)
    padded[0, : len(text)] = torch.frombuffer(bytearray(text + b" "), dtype=torch.uint8)[:-1]
    texts = [bytes(row.tolist()).rstrip(b"\0") for row in group.all_gather(padded)]
    rank = next(rank for rank, found in enumerate(texts) if found)
    return f"rank {rank}: {texts[rank].decode(errors='replace')}"
