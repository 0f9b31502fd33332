"""Wait until every worker that should be there is ready, and the proxy serves."""

import http.client
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.client import ControllerClient, ControllerError
from pdserve.display import StartProgress
from pdserve.errors import PdserveError, StartFailed
from protos import worker_pb2

_POLL_S = 0.1
_HTTP_TIMEOUT_S = 2.0


class Interrupted(PdserveError):
    """The user asked to stop before the service was ready."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How to wait: until when, and what else ends it."""

    stopping: threading.Event
    deadline_s: float
    """On time.monotonic()."""
    check: Callable[[], None]
    """Called between two looks; raises if waiting makes no sense any more."""

    def pause(self, what: str) -> None:
        """Sleep for a moment.

        Raises: Interrupted: asked to stop. StartFailed: the deadline is over, names `what`.
        """
        self.check()
        if self.stopping.wait(_POLL_S):
            raise Interrupted("interrupted")
        if time.monotonic() >= self.deadline_s:
            raise StartFailed(f"gave up waiting for {what}")


def wait_for_workers(client: ControllerClient, wait: Wait, progress: StartProgress) -> None:
    """Return once as many workers as desired are ready.

    Raises: StartFailed: a worker cannot start. Interrupted.
    """
    while True:
        try:
            status = client.status()
        except ControllerError:
            wait.pause("the controller")
            continue
        progress.show("Ray", "ready", 1.0)
        for entry in status.membership.workers:
            progress.show_worker(entry)
            if entry.state == worker_pb2.WORKER_FAILED:
                wait.check()  # it may know the reason of the reason
                raise StartFailed(f"{entry.engine_id} cannot start: {entry.error}")
        waiting_for = unready(status)
        if not waiting_for:
            return
        wait.pause(waiting_for)


def unready(status: worker_pb2.ServiceStatus) -> str:
    """What is missing or too much compared with the desired numbers; empty if nothing."""
    desired = {
        worker_pb2.ROLE_PREFILLER: status.desired_prefillers,
        worker_pb2.ROLE_DECODER: status.desired_decoders,
    }
    workers = status.membership.workers
    others = [entry.engine_id for entry in workers if entry.state != worker_pb2.WORKER_READY]
    is_complete = all(
        sum(entry.role == role for entry in workers) == number for role, number in desired.items()
    )
    return "" if is_complete and not others else ", ".join(others) or "the workers"


def wait_for_http(host: str, port: int, wait: Wait) -> None:
    """Return once GET /ready answers 200.

    Raises: StartFailed: the deadline is over. Interrupted.
    """
    while not is_ready(host, port):
        wait.pause("the proxy")


def is_ready(host: str, port: int) -> bool:
    """Whether GET /ready answers 200."""
    return _get(host, port, "/ready") == 200


def is_responsive(host: str, port: int) -> bool:
    """Whether the proxy answers GET /health, ready or not; waits 2 s at most."""
    return _get(host, port, "/health") == 200


def _get(host: str, port: int, path: str) -> int:
    """The status, or 0 if there is no answer."""
    connection = http.client.HTTPConnection(host, port, timeout=_HTTP_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
