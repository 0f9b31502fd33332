"""The proxy as a child process: start, restart when it dies, stop."""

import json
import logging
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from pdserve.errors import StartFailed
from pdserve.state import write_private
from proxy.config import ProxyConfig

_BACKOFF_MAX_S = 10.0
_STABLE_S = 30.0
_SILENCE_S = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    """What the proxy bound."""

    http_port: int
    grpc_port: int


class ProxyProcess:
    """One proxy; call `supervise` every now and then, from the main thread."""

    def __init__(self, config: ProxyConfig, folder: Path, log: IO[str]) -> None:
        self._config = config
        self._folder = folder
        self._log_file = log
        self._process: subprocess.Popen[bytes] | None = None
        self._started_s = 0.0
        self._restart_at_s = 0.0
        self._num_deaths = 0
        self._silent_since_s: float | None = None

    def start(self) -> None:
        """Begin; `ports` tells when it listens."""
        self._ports_path.unlink(missing_ok=True)
        config_path = self._folder / "proxy.json"
        write_private(config_path, self._config.to_json())
        command = [sys.executable, "-m", "proxy", "--config", str(config_path)]
        command += ["--ports-file", str(self._ports_path)]
        # NOTE: if this process is killed, the kernel ends the proxy too. A thread that ends would
        # count as well: start it from the main thread.
        if setpriv := shutil.which("setpriv"):
            command = [setpriv, "--pdeathsig", "TERM", "--", *command]
        # A session of its own: Ctrl-C is for the supervisor, which ends the proxy in order.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._started_s = time.monotonic()

    def ports(self) -> Ports | None:
        """The bound ports, once it listens. They stay the same when it is restarted.

        Raises: StartFailed: it ended instead.
        """
        if self._process is not None and self._process.poll() is not None:
            status = self._process.returncode
            raise StartFailed(f"the proxy ended with status {status}{self._last_words()}")
        try:
            values = json.loads(self._ports_path.read_text())
        except FileNotFoundError:
            return None
        ports = Ports(values["http_port"], values["grpc_port"])
        self._config = replace(self._config, http_port=ports.http_port, grpc_port=ports.grpc_port)
        return ports

    def _last_words(self) -> str:
        """The last line that it said; of a traceback that is the error."""
        lines = Path(self._log_file.name).read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f": {last}" if last else ""

    @property
    def is_running(self) -> bool:
        """Whether it ran at the last look; else it waits to be started anew."""
        return self._process is not None

    def supervise(self) -> None:
        """Start it anew if it died; after repeated deaths with a delay."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            status, self._process = self._process.returncode, None
            now_s = time.monotonic()
            is_stable = now_s - self._started_s >= _STABLE_S
            self._num_deaths = 1 if is_stable else self._num_deaths + 1
            delay_s = min(0.5 * 2.0 ** min(self._num_deaths - 1, 10), _BACKOFF_MAX_S)
            self._restart_at_s = now_s + (0.0 if self._num_deaths == 1 else delay_s)
            _log.warning("the proxy died with status %s", status)
        if time.monotonic() >= self._restart_at_s:
            try:
                self.start()
            except OSError as error:  # a full disk, too many processes: that may pass
                _log.warning("the proxy cannot be started: %s", error)
                self._restart_at_s = time.monotonic() + _BACKOFF_MAX_S

    def note_answer(self, answered: bool) -> None:
        """Take note of a probe; a proxy that has answered none for so long hangs, and is killed."""
        now_s = time.monotonic()
        if answered or self._process is None:
            self._silent_since_s = None
        elif self._silent_since_s is None:
            self._silent_since_s = now_s
        elif now_s - self._silent_since_s >= _SILENCE_S:
            _log.warning(
                "the proxy did not answer for %.0f s: killed", now_s - self._silent_since_s
            )
            self._silent_since_s = None
            self._process.kill()

    def terminate(self) -> None:
        """Ask it to end: running requests get its grace."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait until it has ended; kill it after `timeout_s`."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _ports_path(self) -> Path:
        return self._folder / "ports.json"
