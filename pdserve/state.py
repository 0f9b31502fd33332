"""What is known of a running service, on this machine: one folder per service, owner-only.

~/.pdserve/<service>/  state.json  lock  proxy.json  ports.json  desired.json  cores/
                       ray_folder  ray_processes  supervisor.log  logs/
"""

import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Literal

from pdserve.errors import ServiceExists, ServiceNotRunning, StateDamaged

DEFAULT_SERVICE = "pdserve"
DEFAULT_ROOT = Path("~/.pdserve")
_LOCK_TIMEOUT_S = 0.5

Status = Literal["starting", "ready", "stopping"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceState:
    """Written by the supervisor, read by every other command."""

    service: str
    status: Status
    pid: int
    """The supervisor."""
    model: str
    host: str
    http_port: int
    grpc_port: int
    controller_address: str
    needs_key: bool
    """Whether clients have to show an API key."""
    token: str
    """The cluster's secret: why the file is for its owner only."""
    root: str = field(default="", compare=False)
    """Where it is noted, which is not noted itself; empty for the default."""

    @property
    def http_url(self) -> str:
        """Where the OpenAI API is, as a client on this machine would write it."""
        return f"http://{_bracketed(self.reachable_host)}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        """Where the gRPC API is."""
        return f"{_bracketed(self.reachable_host)}:{self.grpc_port}"

    @property
    def reachable_host(self) -> str:
        """The host as a client on this machine reaches it."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)


@dataclass(frozen=True, slots=True)
class StateFolder:
    """The files of one service."""

    root: Path
    service: str

    @property
    def path(self) -> Path:
        """The folder itself."""
        return self.root / self.service

    @property
    def log_path(self) -> Path:
        """What a detached supervisor and the proxy say; emptied by the one that has the lock."""
        return self.path / "supervisor.log"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the one supervisor of the service; the kernel drops the lock when the process dies.

        Raises: ServiceExists: another one is.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.path / "lock").open("w") as lock:
            # NOTE: whoever asks whether a supervisor lives holds the lock for a moment too.
            deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
            while not _try_lock(lock):
                if time.monotonic() >= deadline_s:
                    raise ServiceExists(self._exists_message())
                time.sleep(0.01)
            try:
                yield
            finally:
                self._state_path.unlink(missing_ok=True)

    def check_free(self) -> None:
        """Look before anything is started; `locked` decides.

        Raises: ServiceExists: a supervisor lives.
        """
        if self.is_locked():
            raise ServiceExists(self._exists_message())

    def is_locked(self) -> bool:
        """Whether a supervisor lives."""
        try:
            with (self.path / "lock").open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def write(self, state: ServiceState) -> None:
        """Publish the state, at once and for its owner only."""
        values = asdict(state)
        del values["root"]
        write_private(self._state_path, json.dumps(values, indent=2))

    def read(self) -> ServiceState | None:
        """The state of a living service; None while it begins, or when there is none.

        Raises: StateDamaged.
        """
        if not self.is_locked():
            return None
        try:
            values = json.loads(self._state_path.read_text())
            return ServiceState(**values, root=str(self.root))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            raise StateDamaged(
                f"a service `{self.service}` runs, but {self._state_path} is damaged"
            ) from None

    def read_running(self) -> ServiceState:
        """The state of a living service.

        Raises: ServiceNotRunning: there is none. StateDamaged.
        """
        state = self.read()
        if state is None:
            name = "" if self.service == DEFAULT_SERVICE else f" --set service={self.service}"
            place = place_options(DEFAULT_SERVICE, str(self.root))
            raise ServiceNotRunning(
                f"no service `{self.service}` runs; start it: pdserve up{name}{place}"
            )
        return state

    @property
    def _state_path(self) -> Path:
        return self.path / "state.json"

    def _exists_message(self) -> str:
        state = self.read()
        url = f", {state.http_url}" if state and state.http_port else ""
        where = f" (pid {state.pid}{url})" if state else ""
        stop = f"pdserve down{place_options(self.service, str(self.root))}"
        return (
            f"service `{self.service}` runs already{where}: "
            f"stop it with `{stop}`, or start another with --set service=NAME and other ports"
        )


def place_options(service: str, root: str) -> str:
    """What commands need to find a service, with a space before it; root: empty for the default."""
    options = [] if service == DEFAULT_SERVICE else ["--service", service]
    # NOTE: unlike Path's, this expansion takes a user without a home.
    if root and root != os.path.expanduser(DEFAULT_ROOT):
        options += ["--state-dir", root]
    return "".join(f" {shlex.quote(option)}" for option in options)


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def write_private(path: Path, text: str) -> None:
    """Replace a file at once; only its owner may read it.

    Raises: OSError: it stays as it was; names the file.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    partial.replace(path)
