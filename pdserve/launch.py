"""`pdserve up`: start everything, watch over it, stop everything.

lock -> proxy process ─┐
        Ray -> controller -> workers ─┴─> ready -> supervise ... signal -> proxy, workers, Ray end

The proxy and Ray start side by side: the proxy loads its tokenizer while Ray comes up.
"""

import logging
import os
import resource
import shutil
import signal
import socket
import threading
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich.console import Console

from kernels.cpu.cores import usable_cores
from pdserve.alarm import Alarm
from pdserve.client import ControllerClient, ControllerError, connect
from pdserve.config import ServiceConfig, proxy_config, resolve, worker_configs
from pdserve.controller_config import ControllerConfig, RoleConfig
from pdserve.display import StartProgress, print_banner, start_progress
from pdserve.errors import ServiceLost, StartFailed
from pdserve.leftovers import note_processes
from pdserve.model_fit import fit
from pdserve.models import find_model
from pdserve.proxy_process import Ports, ProxyProcess
from pdserve.ray_runtime import (
    NAMESPACE,
    ControllerHandle,
    RayConnection,
    cluster_ray,
    local_ray,
)
from pdserve.readiness import Wait, is_responsive, wait_for_http, wait_for_workers
from pdserve.state import ServiceState, StateFolder, Status

_START_TIMEOUT_S = 900.0
_SUPERVISE_S = 0.2
_START_CHECK_S = 0.5
_CHECK_S = 10.0
_LATE_CHECK_S = 2.0
_NOTE_S = 60.0
_CONTROLLER_LOST_S = 60.0
_CONTROLLER_STOP_S = 5.0
_PROXY_KILL_AFTER_S = 1.5
_LEAST_OPEN_FILES = 256
_MOST_OPEN_FILES = 65536

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that is decided before anything starts."""

    config: ServiceConfig
    model_path: Path
    token: str
    controller_port: int

    @property
    def controller_address(self) -> str:
        """Where the controller serves; on this machine."""
        return f"127.0.0.1:{self.controller_port}"


def make_plan(config: ServiceConfig, token: str) -> Plan:
    """Find the model and the ports.

    Raises: ModelNotFound, BadModel. ConfigError: the model does not go with the configuration.
        StartFailed: a port is taken; names it.
    """
    config = resolve(config)
    model = find_model(config.model)
    config = fit(config, model)
    for name, port in (("http_port", config.http_port), ("grpc_port", config.grpc_port)):
        _check_port_free(config.host, name, port)
    return Plan(config=config, model_path=model.path, token=token, controller_port=_free_port())


def run_service(plan: Plan, folder: StateFolder, console: Console) -> None:
    """Serve until SIGINT or SIGTERM; everything has ended when it returns or raises.

    Raises: ServiceExists, StartFailed, Interrupted, ServiceLost.
    """
    raise_open_files()
    with folder.locked():
        folder.log_path.write_text("")
        _Supervisor(plan, folder, console).run()


def raise_open_files() -> None:
    """Let this process, and all that it starts, have the files open that the system allows.

    NOTE: workers and Ray's processes with too few start, and die when requests come.

    Raises: StartFailed: too few are allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    if most < _LEAST_OPEN_FILES:
        raise StartFailed(
            f"a process may have {most} files open (ulimit -Hn), a service needs "
            f"{_LEAST_OPEN_FILES}, and one more for each stream"
        )
    if soft != resource.RLIM_INFINITY and soft < (wanted := min(most, _MOST_OPEN_FILES)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass(frozen=True, slots=True)
class _Started:
    ray: RayConnection
    client: ControllerClient
    proxy: ProxyProcess
    ports: Ports


@dataclass(slots=True)
class _Supervisor:
    plan: Plan
    folder: StateFolder
    console: Console
    stopping: threading.Event = field(default_factory=threading.Event)
    alarm: Alarm = field(default_factory=Alarm)
    """Rings at signals, also when a child has ended: the proxy, or one of Ray's processes."""
    started_s: float = field(default_factory=time.monotonic)
    note_problem: str = ""
    """Why the last note of processes could not be written; empty if it was."""

    def run(self) -> None:
        self._handle_signals()
        with ExitStack() as stack:
            with start_progress(self.console) as progress:
                started = self._start(stack, progress)
            ports = started.ports
            state = self._write_state("ready", ports)
            self._banner(state)
            self._supervise(started, state.reachable_host)
            self.console.print("stopping ...")
            with suppress(OSError):  # a full disk must not keep it from ending in order
                self._write_state("stopping", ports)

    def _start(self, stack: ExitStack, progress: StartProgress) -> "_Started":
        """Start all parts; what ends them again is on the stack."""
        log = stack.enter_context(self.folder.log_path.open("a"))
        self._write_state("starting", Ports(self._config.http_port, self._config.grpc_port))
        progress.show("Ray", "starting", None)
        progress.show("proxy", "starting", None)
        proxy = self._start_proxy(stack, log)
        ray_connection = stack.enter_context(self._ray())
        # NOTE: again: Ray installs handlers of its own.
        self._handle_signals()
        client = stack.enter_context(connect(self.plan.controller_address, self.plan.token))
        controller = ControllerHandle(self._controller_config())
        stack.callback(_end_controller, ray_connection, client, controller)
        # NOTE: the proxy ends before the workers do: running requests have its grace.
        stack.callback(self._end_proxy, proxy)
        ports = self._wait_until_ready(ray_connection, client, proxy, progress)
        ray_connection.leave()
        # NOTE: and again: a driver that goes sets SIGTERM back to what it is without a handler.
        self._handle_signals()
        return _Started(ray_connection, client, proxy, ports)

    @property
    def _config(self) -> ServiceConfig:
        return self.plan.config

    def _handle_signals(self) -> None:
        def stop(*_: object) -> None:
            self.stopping.set()
            self.alarm.ring()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        signal.signal(signal.SIGCHLD, lambda *_: self.alarm.ring())

    def _start_proxy(self, stack: ExitStack, log: IO[str]) -> ProxyProcess:
        config = proxy_config(
            self._config,
            model_path=str(self.plan.model_path),
            controller_address=self.plan.controller_address,
            token=self.plan.token,
        )
        proxy = ProxyProcess(config, self.folder.path, log)
        stack.callback(self._end_proxy, proxy)
        proxy.start()
        return proxy

    def _end_proxy(self, proxy: ProxyProcess) -> None:
        proxy.terminate()
        proxy.wait(self._config.proxy.shutdown_grace_s + _PROXY_KILL_AFTER_S)

    def _ray(self) -> AbstractContextManager[RayConnection]:
        if not self._config.is_local:
            return cluster_ray(self._config.ray.address)
        num_cpus = usable_cores()
        return local_ray(num_cpus, self._config.ray.object_store_bytes, self.folder.path)

    def _controller_config(self) -> ControllerConfig:
        config = self._config
        desired_path = self.folder.path / "desired.json"
        desired_path.unlink(missing_ok=True)
        cores_folder = self.folder.path / "cores"
        shutil.rmtree(cores_folder, ignore_errors=True)
        prefiller, decoder = worker_configs(
            config,
            model_path=str(self.plan.model_path),
            token=self.plan.token,
            # In a cluster Ray gives each worker its CPUs.
            cores_folder=str(cores_folder) if config.is_local else "",
        )
        # NOTE: with a Ray of our own any number of workers has to fit: they share the cores.
        is_shared = config.is_local
        return ControllerConfig(
            service=config.service,
            port=self.plan.controller_port,
            token=self.plan.token,
            namespace=NAMESPACE,
            worker_host="127.0.0.1" if config.is_local else "",
            desired_path=str(desired_path),
            stop_timeout_s=3.0,
            prefiller=RoleConfig(
                entry="prefiller.actor:start",
                worker_json=prefiller.to_json(),
                replicas=config.prefiller.replicas,
                num_ranks=config.prefiller.num_ranks,
                num_cpus=0 if is_shared else prefiller.num_threads,
                num_npus=config.ray.npus_per_worker,
            ),
            decoder=RoleConfig(
                entry="decoder.actor:start",
                worker_json=decoder.to_json(),
                replicas=config.decoder.replicas,
                num_ranks=config.decoder.num_ranks,
                num_cpus=0 if is_shared else decoder.num_threads,
                num_npus=config.ray.npus_per_worker,
            ),
        )

    def _wait_until_ready(
        self,
        ray_connection: RayConnection,
        client: ControllerClient,
        proxy: ProxyProcess,
        progress: StartProgress,
    ) -> Ports:
        asked_s = time.monotonic()

        def check() -> None:
            nonlocal asked_s
            now_s = time.monotonic()
            is_alive = ray_connection.has_own_processes
            if is_alive and now_s - asked_s >= _START_CHECK_S:
                asked_s, is_alive = now_s, ray_connection.is_alive()
                self._note_processes()
            if not is_alive:
                raise StartFailed("Ray has ended")
            if proxy.ports() is not None:
                progress.show("proxy", "ready", 1.0)

        deadline_s = time.monotonic() + _START_TIMEOUT_S
        wait = Wait(self.stopping, deadline_s, check)
        try:
            wait_for_workers(client, wait, progress)
            while (ports := proxy.ports()) is None:
                wait.pause("the proxy")
            state = self._write_state("starting", ports)
            wait_for_http(state.reachable_host, ports.http_port, wait)
            # NOTE: the last time before Ray is told good-bye, which a dead one takes badly.
            check()
        except StartFailed as error:
            raise StartFailed(f"{error}\nlogs: {self.folder.path}") from error
        progress.show("proxy", "ready", 1.0)
        return ports

    def _banner(self, state: ServiceState) -> None:
        replicas = (self._config.prefiller.replicas, self._config.decoder.replicas)
        print_banner(self.console, state, replicas, time.monotonic() - self.started_s)

    def _write_state(self, status: Status, ports: Ports) -> ServiceState:
        state = ServiceState(
            service=self._config.service,
            status=status,
            pid=os.getpid(),
            model=self._config.public_name,
            host=self._config.host,
            http_port=ports.http_port,
            grpc_port=ports.grpc_port,
            controller_address=self.plan.controller_address,
            needs_key=self._config.needs_key,
            token=self.plan.token,
            root=str(self.folder.root),
        )
        self.folder.write(state)
        return state

    def _note_processes(self) -> None:
        if not self._config.is_local:
            return
        try:
            note_processes(self.folder.path)
        except OSError as error:
            problem = f"cannot note what runs: {error}"
        else:
            problem = ""
        if problem and problem != self.note_problem:
            _log.warning("%s", problem)
        self.note_problem = problem

    def _supervise(self, started: "_Started", host: str) -> None:
        """Until asked to stop: keep the proxy alive. Ray keeps the controller alive.

        Raises: ServiceLost: Ray is gone, or nobody has heard of the controller for long.
        """
        heard_s = asked_s = time.monotonic()
        noted_s, generation, check_s = heard_s, -1, _CHECK_S
        self._note_processes()
        while True:
            rest_s = asked_s + check_s - time.monotonic()
            self.alarm.wait(rest_s if started.proxy.is_running else _SUPERVISE_S)
            if self.stopping.is_set():
                return
            started.proxy.supervise()
            if not started.ray.has_own_processes:
                raise ServiceLost("Ray has ended: stopping")
            now_s = time.monotonic()
            if now_s - asked_s >= check_s:
                asked_s = now_s
                answers = is_responsive(host, started.ports.http_port)
                started.proxy.note_answer(answers)
                # A silent proxy is asked more often, so that it is not left silent for longer.
                check_s = _CHECK_S if answers else _LATE_CHECK_S
                if not started.ray.is_alive():
                    raise ServiceLost("Ray has ended: stopping")
                try:
                    status = started.client.status()
                except ControllerError as error:
                    _log.warning("%s", error)
                else:
                    heard_s = now_s
                    is_changed = status.membership.generation != generation
                    generation = status.membership.generation
                    if is_changed or now_s - noted_s >= _NOTE_S:
                        noted_s = now_s
                        self._note_processes()
            if now_s - heard_s >= _CONTROLLER_LOST_S:
                raise ServiceLost(f"no controller for {_CONTROLLER_LOST_S:.0f} s: stopping")


def _end_controller(
    connection: RayConnection, client: ControllerClient, controller: ControllerHandle
) -> None:
    if not connection.has_own_processes:
        return  # it ends with its Ray
    try:
        client.stop(_CONTROLLER_STOP_S)
    except ControllerError as error:
        _log.warning("the controller did not stop in order: %s", error)
    controller.kill()


def _check_port_free(host: str, name: str, port: int) -> None:
    if not port:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise StartFailed(
                f"{name} {port} on {host} cannot be used: {error.strerror}; "
                f"stop what listens there, or choose another: --set {name}=N"
            ) from error


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
