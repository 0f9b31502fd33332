"""The controller on a real Ray with real worker processes, which only lack a model."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray

from engine.worker.config import WorkerConfig
from pdserve.controller import ControllerActor
from pdserve.controller_config import ControllerConfig, RoleConfig
from pdserve.processes import is_alive
from pdserve.wire import token_metadata
from protos import worker_pb2, worker_pb2_grpc

TOKEN = "secret"
READY, FAILED = worker_pb2.WORKER_READY, worker_pb2.WORKER_FAILED

Entries = dict[str, worker_pb2.WorkerEntry]


@dataclass
class Service:
    """A running controller and a client of it."""

    actor: Any
    stub: worker_pb2_grpc.ControllerStub
    switches: Path

    def status(self) -> worker_pb2.ServiceStatus:
        return self.stub.GetStatus(
            worker_pb2.GetStatusRequest(), metadata=token_metadata(TOKEN), timeout=5
        )

    def entries(self) -> Entries:
        return {entry.engine_id: entry for entry in self.status().membership.workers}

    def scale(self, grace_ms: int = 0, **numbers: int) -> None:
        request = worker_pb2.ScaleRequest(grace_ms=grace_ms, **numbers)
        self.stub.Scale(request, metadata=token_metadata(TOKEN), timeout=5)

    def wait(self, what: Callable[[Entries], bool], timeout_s: float = 20.0) -> Entries:
        """Poll until `what` holds; the entries then."""
        deadline_s = time.monotonic() + timeout_s
        while not what(entries := self.entries()):
            assert time.monotonic() < deadline_s, entries
            time.sleep(0.02)
        return entries

    def wait_ready(self, *engine_ids: str) -> Entries:
        """Poll until exactly these workers exist and are ready."""
        return self.wait(
            lambda entries: (
                set(entries) == set(engine_ids)
                and all(entry.state == READY for entry in entries.values())
            )
        )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture
def service(local_ray: str, tmp_path: Path) -> Iterator[Service]:
    worker = WorkerConfig(engine_id="", model_path=str(tmp_path), model_name="m").to_json()
    role = RoleConfig(entry="tests.pdserve.fake_worker:FakeWorker", worker_json=worker, replicas=1)
    config = ControllerConfig(
        service=tmp_path.name,
        port=free_port(),
        token=TOKEN,
        namespace=local_ray,
        desired_path=str(tmp_path / "desired.json"),
        prefiller=role,
        decoder=role,
        backoff_min_s=0.3,
        max_quick_deaths=2,
        drain_settle_s=0.2,
        poll_s=0.5,
        silence_s=3.0,
    )
    options = {"name": tmp_path.name, "max_restarts": -1, "num_cpus": 0, "namespace": local_ray}
    actor = ray.remote(ControllerActor).options(**options).remote(config.to_json())
    with grpc.insecure_channel(f"127.0.0.1:{config.port}") as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        yield Service(actor, worker_pb2_grpc.ControllerStub(channel), tmp_path)
        assert ray.get(actor.stop.remote(15.0), timeout=20)
    ray.kill(actor)
    leftover = [name for name in ray.util.list_named_actors() if name.startswith(tmp_path.name)]
    assert leftover == []


def test_workers_come_up_ready_with_an_address_and_a_node(service: Service) -> None:
    entries = service.wait_ready("decoder-0", "prefiller-0")
    assert entries["decoder-0"].role == worker_pb2.ROLE_DECODER
    assert all(entry.address.startswith("127.0.0.1:") for entry in entries.values())
    assert all(entry.pid and entry.node for entry in entries.values())


def test_a_caller_without_the_token_is_refused(service: Service) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        service.stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_killed_worker_leaves_ready_at_once_and_comes_back_as_a_new_incarnation(
    service: Service,
) -> None:
    before = service.wait_ready("decoder-0", "prefiller-0")["prefiller-0"]
    os.kill(before.pid, signal.SIGKILL)
    started_s = time.monotonic()
    service.wait(lambda entries: entries["prefiller-0"].state != READY, timeout_s=5)
    assert time.monotonic() - started_s < 1.0
    after = service.wait_ready("decoder-0", "prefiller-0")["prefiller-0"]
    assert after.incarnation > before.incarnation
    assert (after.num_restarts, after.pid != before.pid) == (1, True)


def test_a_worker_that_stands_still_gets_no_work_until_it_answers_again(service: Service) -> None:
    before = service.wait_ready("decoder-0", "prefiller-0")["prefiller-0"]
    os.kill(before.pid, signal.SIGSTOP)
    try:
        entries = service.wait(lambda now: now["prefiller-0"].state != READY)
    finally:
        os.kill(before.pid, signal.SIGCONT)
    assert entries["prefiller-0"].phase == "not answering"
    assert entries["decoder-0"].state == READY
    after = service.wait_ready("decoder-0", "prefiller-0")["prefiller-0"]
    assert (after.incarnation, after.num_restarts) == (before.incarnation, 0)


def test_a_watcher_sees_growing_generations_and_a_heartbeat(service: Service) -> None:
    service.wait_ready("decoder-0", "prefiller-0")
    stream = service.stub.Watch(
        worker_pb2.WatchRequest(proxy_id="p"), metadata=token_metadata(TOKEN), timeout=30
    )
    first = next(stream)
    heartbeat = next(stream)
    assert heartbeat.generation >= first.generation
    service.scale(prefillers=2)
    assert next(stream).generation > heartbeat.generation
    stream.cancel()


def test_scaling_up_adds_workers_and_down_removes_the_last_ones(service: Service) -> None:
    service.wait_ready("decoder-0", "prefiller-0")
    service.scale(prefillers=2, decoders=3)
    service.wait_ready("decoder-0", "decoder-1", "decoder-2", "prefiller-0", "prefiller-1")
    assert service.status().desired_decoders == 3
    service.scale(prefillers=0, decoders=1)
    service.wait_ready("decoder-0")
    assert (service.switches / "decoder-2.stopped").exists()
    # Numbers that cannot be noted, as on a full disk, would be forgotten by the next controller.
    (service.switches / "desired.partial").mkdir()
    with pytest.raises(grpc.RpcError, match="cannot be noted") as caught:
        service.scale(decoders=2)
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert service.status().desired_decoders == 1


def test_stop_answers_when_every_worker_has_stopped(service: Service) -> None:
    entries = service.wait_ready("decoder-0", "prefiller-0")
    with pytest.raises(grpc.RpcError) as caught:
        service.stub.Stop(worker_pb2.StopRequest(), timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    service.wait_ready("decoder-0", "prefiller-0")
    service.stub.Stop(worker_pb2.StopRequest(), metadata=token_metadata(TOKEN), timeout=15)
    assert {path.name for path in service.switches.glob("*.stopped")} == {
        "decoder-0.stopped",
        "prefiller-0.stopped",
    }
    deadline_s = time.monotonic() + 10
    while any(is_alive(entry.pid) for entry in entries.values()):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_worker_that_has_to_go_drains_until_its_last_request_is_over(service: Service) -> None:
    leases = service.switches / "decoder-1.leases"
    leases.write_text("2")
    service.wait_ready("decoder-0", "prefiller-0")
    service.scale(decoders=2)
    service.wait_ready("decoder-0", "decoder-1", "prefiller-0")
    service.scale(decoders=1, grace_ms=20_000)
    service.wait(lambda entries: entries["decoder-1"].state == worker_pb2.WORKER_DRAINING)
    time.sleep(0.5)  # longer than the shortest drain: it must still be there
    assert service.entries()["decoder-1"].address
    leases.write_text("0")
    service.wait_ready("decoder-0", "prefiller-0")


def test_a_drain_ends_when_the_grace_is_over(service: Service) -> None:
    (service.switches / "prefiller-0.leases").write_text("1")
    service.wait_ready("decoder-0", "prefiller-0")
    service.scale(prefillers=0, grace_ms=300)
    service.wait_ready("decoder-0")


@pytest.mark.parametrize("numbers", [{"decoders": 0}, {"prefillers": 100_000}])
def test_a_number_out_of_range_is_refused(service: Service, numbers: dict[str, int]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        service.scale(**numbers)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_worker_that_cannot_start_is_failed_with_its_error_until_it_can(
    service: Service,
) -> None:
    service.wait_ready("decoder-0", "prefiller-0")
    switch = service.switches / "prefiller-1.fail"
    switch.touch()
    service.scale(prefillers=2)
    entries = service.wait(lambda now: "prefiller-1" in now and now["prefiller-1"].state == FAILED)
    assert entries["prefiller-1"].error == "no such weights"
    switch.unlink()
    service.wait_ready("decoder-0", "prefiller-0", "prefiller-1")


def test_a_worker_that_dies_again_and_again_is_failed_and_not_restarted_at_once(
    service: Service,
) -> None:
    service.wait_ready("decoder-0", "prefiller-0")
    last_pid = 0
    for _ in range(3):
        entries = service.wait(
            lambda now, seen=last_pid: now["decoder-0"].pid not in (0, seen)  # type: ignore[misc]
        )
        last_pid = entries["decoder-0"].pid
        os.kill(last_pid, signal.SIGKILL)
    entries = service.wait(lambda now: now["decoder-0"].state == FAILED)
    assert "3 times in a row" in entries["decoder-0"].error
    service.wait_ready("decoder-0", "prefiller-0")


def test_a_restarted_controller_adopts_its_workers_and_remembers_the_numbers(
    service: Service,
) -> None:
    service.scale(prefillers=2)
    before = service.wait_ready("decoder-0", "prefiller-0", "prefiller-1")
    generation = service.status().membership.generation
    ray.kill(service.actor, no_restart=False)
    deadline_s = time.monotonic() + 20
    status = service.status()
    while time.monotonic() < deadline_s and status.membership.generation <= generation:
        time.sleep(0.05)
        with suppress(grpc.RpcError):  # the port is closed while Ray restarts it
            status = service.status()
    after = {entry.engine_id: entry for entry in status.membership.workers}
    assert {name: (entry.incarnation, entry.state) for name, entry in after.items()} == {
        name: (entry.incarnation, READY) for name, entry in before.items()
    }
    assert status.desired_prefillers == 2
