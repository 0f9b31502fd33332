"""Ray around a service: an own one on this machine, or the cluster that this machine belongs to."""

import atexit
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.services import resolve_ip_for_localhost
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pdserve.controller import ControllerActor
from pdserve.controller_config import ControllerConfig
from pdserve.errors import StartFailed
from pdserve.leftovers import make_ray_folder, note_processes, remove_leftovers
from pdserve.processes import ProcessId, descendants, ended_children

NAMESPACE = "pdserve"
_CONNECT_TIMEOUT_S = 2.0
_NOTE_S = 0.5
_MAX_LOG_BYTES = 10 << 20
_CORE_PROCESSES = ("gcs_server", "raylet")
_SPARE_SCRIPTS = ("dashboard.py",)
_CALM_RAY: dict[str, int | bool] = {
    "raylet_report_resources_period_milliseconds": 1000,
    "raylet_check_gc_period_milliseconds": 5000,
    "kill_idle_workers_interval_ms": 5000,
    "object_manager_timer_freq_ms": 5000,
    "local_fs_monitor_interval_ms": 5000,
    "gcs_pull_resource_loads_period_milliseconds": 10_000,
    "ray_syncer_message_refresh_interval_ms": 30_000,
    "health_check_period_ms": 10_000,
    "grpc_keepalive_time_ms": 60_000,
    "object_manager_rpc_threads_num": 1,
    "core_worker_internal_heartbeat_ms": 5000,
    "report_worker_backlog_interval_ms": 10_000,
    "io_context_monitor_probe_interval_ms": 10_000,
    "debug_dump_period_milliseconds": 0,
    "task_events_report_interval_ms": 0,
    "ray_events_report_interval_ms": 0,
    "metrics_report_interval_ms": 60_000,
    "enable_metrics_collection": False,
    "enable_timeline": False,
    "event_stats": False,
}
"""Ray's own timers and books, for one node and a few actors that live for ever.

NOTE: the default is up to ten times a second in every process. None of these tells that a process
died: sockets and the parent's `wait` do.
"""
_CALM_AGENT = {"REPORTER_UPDATE_INTERVAL_MS": "60000", "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60"}
"""Environment of Ray's agent, which looks at every process of the node for a dashboard."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RayConnection:
    """The Ray that this process is connected to."""

    gcs_address: str
    node_id: str
    own: tuple[ProcessId, ...]
    """Its core processes, if it is a Ray of our own."""

    def leave(self) -> None:
        """Be no driver any more of a Ray of our own; what runs in it goes on.

        NOTE: a driver has a dozen threads that look up four to ten times a second, for ever.
        """
        if self.own:
            ray.shutdown()

    @property
    def has_own_processes(self) -> bool:
        """Whether all of them live."""
        return all(process.is_alive() for process in self.own)

    def is_alive(self) -> bool:
        """Whether its control service and this node live; without them nothing is restarted.

        A node of a cluster that died is known as dead after Ray's time-outs, some 15 s.
        """
        if not self.has_own_processes:
            return False
        host, _, port = self.gcs_address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
            if self.own:
                return True
            nodes = {node["NodeID"]: node["Alive"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
        except ConnectionRefusedError:
            return False
        except (OSError, RayError):
            return True  # cannot tell
        return bool(nodes.get(self.node_id, True))


@contextmanager
def local_ray(
    num_cpus: int, object_store_bytes: int, state_folder: Path
) -> Iterator[RayConnection]:
    """A Ray of our own on this machine; it and its files are gone afterwards.

    What its workers said is kept in `logs` below the state folder.

    Raises: StartFailed: it does not start.
    """
    remove_leftovers(state_folder)
    folder = make_ray_folder(state_folder)
    try:
        for name, value in _CALM_AGENT.items():
            os.environ.setdefault(name, value)
        with ExitStack() as stack:
            with _noted(state_folder), _watched():
                node = stack.enter_context(_own_node(num_cpus, object_store_bytes, folder))
                connection = stack.enter_context(_connected(node.gcs_address))
            _end_spare_processes()
            note_processes(state_folder)
            try:
                yield connection
            finally:
                # NOTE: before their parent ends: not all of them end with it.
                with suppress(OSError):
                    note_processes(state_folder)
    finally:
        _keep_logs(folder, state_folder / "logs")
        remove_leftovers(state_folder)


@contextmanager
def _noted(state_folder: Path) -> Iterator[None]:
    """Note what runs below us, over and over, and at the end.

    NOTE: a Ray that does not come up is left as it is; and agents of a raylet that died meanwhile
    live on, below nobody we know.
    """
    is_over = threading.Event()

    def note() -> None:
        while not is_over.wait(_NOTE_S):
            with suppress(OSError):
                note_processes(state_folder)

    thread = threading.Thread(target=note, name="notes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        with suppress(OSError):
            note_processes(state_folder)


@contextmanager
def _watched() -> Iterator[None]:
    """Give up when one of Ray's core processes, our children, ends while we wait for Ray.

    NOTE: Ray's own patience with a raylet that died is a minute. A call of its library that is
    under way is not cut off: the longest one, of a node that starts, takes half a minute.

    Raises: StartFailed.
    """

    def look(*_: object) -> None:
        if not set(_CORE_PROCESSES).isdisjoint(ended_children()):
            raise StartFailed("Ray has ended")

    previous = signal.signal(signal.SIGCHLD, look)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, previous or signal.SIG_DFL)


@contextmanager
def _own_node(num_cpus: int, object_store_bytes: int, folder: Path) -> Iterator[Node]:
    """Ray's processes as children of this one, which need not be their driver.

    NOTE: `ray.init` can start them too, but ends them when the driver goes.

    Raises: StartFailed.
    """
    parameters = RayParams(
        node_ip_address=resolve_ip_for_localhost("127.0.0.1"),
        num_cpus=num_cpus,
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]  # Ray says str, and means bool
        no_monitor=True,
        temp_dir=str(folder),
        _system_config=_CALM_RAY,  # type: ignore[arg-type]  # likewise
    )
    with _start_errors():
        node = Node(parameters, head=True, shutdown_at_exit=False)
    try:
        yield node
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=True)


def _end_spare_processes() -> None:
    """End what Ray starts in any case and nobody needs here: what serves the dashboard's API.

    NOTE: with what copies workers' output to drivers (we write it to files) and what scales
    clusters, which are not even started, it took 180 MB and a fifth of an idle service's wake-ups.
    """
    for process in descendants(os.getpid()):
        if any(Path(part).name in _SPARE_SCRIPTS for part in process.arguments()[:4]):
            process.kill()
            with suppress(ChildProcessError):
                os.waitpid(process.pid, 0)


@contextmanager
def cluster_ray(address: str) -> Iterator[RayConnection]:
    """The Ray cluster at `address` (auto: this machine's).

    Raises: StartFailed: there is none.
    """
    if address != "auto":
        _check_reachable(address)
    with _connected(address) as connection:
        yield connection


def _check_reachable(address: str) -> None:
    """Ray itself would try for two minutes, and not hear Ctrl-C meanwhile."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartFailed(f"ray.address {address} cannot be reached: {reason}") from error


class ControllerHandle:
    """The controller's actor."""

    def __init__(self, config: ControllerConfig) -> None:
        name = f"{config.service}-controller"
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

    def kill(self) -> None:
        """End its process for good; without a driver, its Ray has to end."""
        if ray.is_initialized():
            with suppress(RayError):
                ray.kill(self._handle, no_restart=True)

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
def _connected(address: str) -> Iterator[RayConnection]:
    with _start_errors():
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    context = ray.get_runtime_context()
    own = tuple(p for p in descendants(os.getpid()) if p.name() in _CORE_PROCESSES)
    connection = RayConnection(context.gcs_address, context.get_node_id(), own)
    try:
        yield connection
    finally:
        if connection.is_alive():
            ray.shutdown()
        elif ray.is_initialized():
            # NOTE: Ray ends a process at once that tells a dead raylet good-bye, and crashes one
            # that goes without.
            atexit.unregister(ray.shutdown)
            atexit.register(_end_at_once)


def _end_at_once() -> None:
    """Leave without what C++ libraries do at the end; only failures come here."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextmanager
def _start_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # NOTE: Ray raises no narrower one when its processes do not start
        raise StartFailed(f"Ray could not start: {error}") from error


def _keep_logs(folder: Path, log_folder: Path) -> None:
    """Save what the workers said; Ray's own logs go with its folder."""
    shutil.rmtree(log_folder, ignore_errors=True)
    log_folder.mkdir(parents=True)
    for path in folder.glob("session_*/logs/worker-*"):
        if not path.is_symlink() and 0 < path.stat().st_size <= _MAX_LOG_BYTES:
            shutil.copy(path, log_folder / path.name)
