"""Life of a worker process: load in the background, serve, run the loop, report.

starting (phase, progress) --> ready --> stopped
         \\-- failed (error), the process stays so that the error can be read
ready --an exception leaves the loop--> the process exits with 1 and its owner restarts it
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.worker.config import WorkerConfig
from engine.worker.local_ranks import LocalLauncher
from engine.worker.ranks import Launcher
from engine.worker.server import ServerThread

_STOP_TIMEOUT_S = 10.0
_LOST_RANK_PATIENCE_S = 1.0

_log = logging.getLogger(__name__)

Info = dict[str, str | int | float]
Report = Callable[[str, float], None]
"""report(phase, progress from 0 to 1)."""


class Loop(Protocol):
    """An engine loop as its process sees it."""

    @property
    def summary(self) -> str:
        """What was made at the start and is worth showing beside its state; empty: nothing."""
        ...

    def run(self) -> None:
        """Work until asked to stop; called on the process's engine thread."""
        ...

    def request_stop(self) -> None:
        """Make `run` return after the current step; any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Start:
    """What a role needs to build its loop."""

    config: WorkerConfig
    incarnation: int
    server: ServerThread
    address: str
    report: Report
    launcher: Launcher
    """Starts the other ranks, if there are any."""
    on_lost: Callable[[str], None]
    """Ends the process: the engine has lost a rank."""


class WorkerProcess:
    """Runs one role; `serve` builds the loop, answers on `server` while its context is open."""

    def __init__(
        self,
        config: WorkerConfig,
        serve: Callable[[Start], AbstractContextManager[Loop]],
        launcher: Launcher | None = None,
    ) -> None:
        """launcher: of the other ranks; None starts them on this machine."""
        self._config = config
        self._launcher = launcher or LocalLauncher()
        self._serve = serve
        self._lock = threading.Lock()
        self._loop: Loop | None = None
        # NOTE: the clock in microseconds: a restart takes far longer than any step of it.
        incarnation = time.time_ns() // 1000
        self._info: Info = {
            "engine_id": config.engine_id,
            "incarnation": incarnation,
            "address": "",
            "state": "starting",
            "phase": "starting",
            "progress": 0.0,
            "error": "",
            "pid": os.getpid(),
        }
        self._incarnation = incarnation
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    def info(self) -> Info:
        """A snapshot for the controller."""
        with self._lock:
            return dict(self._info)

    def stop(self) -> None:
        """End the loop and the server; returns when both are over, or after a bounded wait."""
        with self._lock:
            loop = self._loop
        if loop is not None:
            loop.request_stop()
            self._thread.join(_STOP_TIMEOUT_S)

    def _update(self, **values: str | float) -> None:
        with self._lock:
            self._info.update(values)

    def _report(self, phase: str, progress: float) -> None:
        self._update(phase=phase, progress=progress)

    def _main(self) -> None:
        torch.set_num_threads(self._config.num_threads)
        server = ServerThread("grpc")
        try:
            address = f"{self._config.host}:{server.bind(self._config.host)}"
            start = Start(
                self._config,
                self._incarnation,
                server,
                address,
                self._report,
                self._launcher,
                self._on_lost,
            )
            with self._serve(start) as loop:
                with self._lock:
                    self._loop = loop
                phase = f"serving, {loop.summary}" if loop.summary else "serving"
                self._update(address=address, state="ready", phase=phase, progress=1.0)
                self._run(loop)
        except Exception as error:
            _log.exception("worker %s could not start", self._config.engine_id)
            self._update(state="failed", error=f"{type(error).__name__}: {error}")
        else:
            self._update(state="stopped", address="")
        finally:
            server.stop()

    def _run(self, loop: Loop) -> None:
        try:
            loop.run()
        except Exception:
            # NOTE: after an unexpected error nobody knows which blocks are whose. Exit: the streams
            # break, the proxies take their requests elsewhere, Ray starts a clean process.
            _log.exception("engine loop of %s failed: exiting", self._config.engine_id)
            if self._config.parallel.world_size > 1:
                # NOTE: collectives fail as soon as a rank dies; a moment later `_on_lost` is told
                # which one, names it and exits.
                time.sleep(_LOST_RANK_PATIENCE_S)
            self._exit()

    def _on_lost(self, reason: str) -> None:
        """NOTE: the engine thread may wait in a collective that never ends; this is another one."""
        _log.error("engine %s is broken: %s: exiting", self._config.engine_id, reason)
        self._exit()

    def _exit(self) -> None:
        self._launcher.kill()
        logging.shutdown()
        os._exit(1)
