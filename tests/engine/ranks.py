"""Processes that stand by to be the ranks of one engine after another."""

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from engine.parallel import Parallel, join, leave
from engine.parallel_config import ParallelConfig

_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0

Job = Callable[..., Any]
"""job(parallel, *args): runs on every rank; module-level, so that it can be named to a process."""


class Ranks:
    """Up to `size` processes; each job is run by the first world_size of them, as one engine."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._num_jobs = 0
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_END_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join(_END_TIMEOUT_S)
            process.close()
        self._folder.cleanup()

    def run(self, job: Job, *args: Any, **config: Any) -> list[Any]:
        """What `job` returns on every rank of an engine with this ParallelConfig."""
        world_size = ParallelConfig(**config).world_size
        store = Path(self._folder.name) / str(self._num_jobs)
        self._num_jobs += 1
        pipes = self._pipes[:world_size]
        for rank, pipe in enumerate(pipes):
            pipe.send((job, args, ParallelConfig(**config, rank=rank), str(store)))
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(_TIMEOUT_S), f"rank {rank} has not answered within {_TIMEOUT_S} s"
            results.append(pipe.recv())
        for rank, result in enumerate(results):
            assert not isinstance(result, BaseException), f"rank {rank}: {result!r}"
        return results


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            job, args, config, path = pipe.recv()
        except EOFError:
            return
        result: Any
        try:
            store = dist.FileStore(path, config.world_size)
            result = job(join(config, store, timeout_s=_TIMEOUT_S / 2), *args)
        except Exception as error:
            result = error
        leave()
        pipe.send(result)


def alone(job: Job, *args: Any) -> Any:
    """What `job` returns in this process, as the only rank."""
    return job(Parallel(), *args)
