"""Ray around a service: an own one on this machine, or the cluster that this machine belongs to."""

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pdserve.controller import ControllerActor
from pdserve.controller_config import ControllerConfig
from pdserve.errors import StartFailed
from pdserve.processes import descendants, kill_noted, write_note

NAMESPACE = "pdserve"
_CONNECT_TIMEOUT_S = 2.0
_MAX_LOG_BYTES = 10 << 20
_FOLDER_PREFIX = "pdserve-"

_log = logging.getLogger(__name__)


@contextmanager
def local_ray(num_cpus: int, object_store_bytes: int, state_folder: Path) -> Iterator[None]:
    """A Ray of our own on this machine; it and its files are gone afterwards.

    What its workers said is kept in `logs` below the state folder.
    """
    note = state_folder / "ray_folder"
    remove_leftovers(state_folder)
    # NOTE: not below the state folder: the paths of Ray's sockets have to stay below 108 bytes.
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir="/tmp"))
    note.write_text(str(folder))
    try:
        with _connected(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder),
        ):
            note_processes(state_folder)
            yield
    finally:
        _keep_logs(folder, state_folder / "logs")
        remove_leftovers(state_folder)


def note_processes(state_folder: Path) -> None:
    """Note what runs below us now, for the next start to end if we are killed.

    NOTE: workers see the death of Ray only by becoming children of process 1, which a subreaper
    (a container's init, a user session) prevents.
    """
    write_note(state_folder / "ray_processes", descendants(os.getpid()))


@contextmanager
def cluster_ray(address: str) -> Iterator[None]:
    """The Ray cluster at `address` (auto: this machine's)."""
    with _connected(address=address):
        yield


class ControllerHandle:
    """The controller's actor."""

    def __init__(self, config: ControllerConfig) -> None:
        name = f"{config.service}-controller"
        self._gcs_address: str = ray.get_runtime_context().gcs_address
        self._end_leftover(name)
        # NOTE: here: proxies and the command line reach it on this machine's loopback.
        node = NodeAffinitySchedulingStrategy(
            node_id=ray.get_runtime_context().get_node_id(), soft=False
        )
        options: dict[str, Any] = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_task_retries": -1,
            "num_cpus": 0,
            "scheduling_strategy": node,
        }
        self._handle: Any = ray.remote(ControllerActor).options(**options).remote(config.to_json())

    def is_ray_alive(self) -> bool:
        """Whether Ray's control service can be reached; without it nothing is restarted."""
        host, _, port = self._gcs_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # cannot tell
        return True

    def stop(self, timeout_s: float) -> None:
        """End every worker, then the controller; bounded."""
        _stop(self._handle, timeout_s)

    @staticmethod
    def _end_leftover(name: str) -> None:
        """In a cluster, the controller of a supervisor that was killed still lives."""
        try:
            handle = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return
        _log.warning("ending %s of an earlier supervisor", name)
        _stop(handle, 10.0)


def _stop(handle: Any, timeout_s: float) -> None:
    try:
        ray.get(handle.stop.remote(timeout_s), timeout=timeout_s + 1.0)
    except RayError as error:
        _log.warning("the controller did not stop in order: %s", error)
    ray.kill(handle, no_restart=True)


@contextmanager
def _connected(**options: Any) -> Iterator[None]:
    try:
        ray.init(
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **options,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise StartFailed(f"Ray could not start: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def remove_leftovers(state_folder: Path) -> None:
    """End Ray's processes and remove its folder, as noted; a supervisor that was killed could not.

    NOTE: Ray's agents outlive a raylet that is killed.
    """
    kill_noted(state_folder / "ray_processes")
    note = state_folder / "ray_folder"
    if note.is_file():
        folder = Path(note.read_text())
        if folder.name.startswith(_FOLDER_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        note.unlink()


def _keep_logs(folder: Path, log_folder: Path) -> None:
    """Save what the workers said; Ray's own logs go with its folder."""
    shutil.rmtree(log_folder, ignore_errors=True)
    log_folder.mkdir(parents=True)
    for path in folder.glob("session_*/logs/worker-*"):
        if not path.is_symlink() and 0 < path.stat().st_size <= _MAX_LOG_BYTES:
            shutil.copy(path, log_folder / path.name)
