"""The whole service from the command line, on the packaged model: start, use, scale, stop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from kernels.cpu.options import CpuOptions
from pdserve.models import resolve_model
from pdserve.processes import ProcessId, descendants, is_alive
from tests.integration.alone import greedy_alone

pytestmark = pytest.mark.e2e

PORTS = ("--set", "http_port=0", "--set", "grpc_port=0")


class Cli:
    """`pdserve` with a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, name: str, *arguments: str) -> list[str]:
        place = ["--state-dir", str(self.folder)]
        return [sys.executable, "-m", "pdserve", name, *arguments, *place]

    def run(self, name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(name, *arguments),
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def status(self) -> dict[str, object]:
        values: dict[str, object] = json.loads(self.run("status", "--json").stdout)
        return values


def wait_for(what: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def are_gone(processes: list[ProcessId]) -> bool:
    return not any(process.is_alive() for process in processes)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    cli = Cli(tmp_path_factory.mktemp("state"))
    result = cli.run("up", "--detach", *PORTS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "pdserve is ready" in result.stdout
    yield cli
    pids = descendants(int(str(cli.status()["pid"])))
    assert len(pids) > 4
    started_s = time.monotonic()
    assert cli.run("down").returncode == 0
    assert time.monotonic() - started_s < 15
    wait_for(lambda: are_gone(pids), 5)


def test_the_service_answers_and_status_shows_both_workers_ready(service: Cli) -> None:
    status = service.status()
    assert (status["status"], status["is_ready"]) == ("ready", True)
    workers = status["workers"]
    assert isinstance(workers, list)
    assert [(w["engine_id"], w["state"]) for w in workers] == [
        ("decoder-0", "ready"),
        ("prefiller-0", "ready"),
    ]
    models = httpx.get(f"{status['http_url']}/v1/models", timeout=10, trust_env=False).json()
    assert models["data"][0]["id"] == "smollm2-135m-instruct"


def test_tokens_of_the_default_service_are_those_of_one_process(service: Cli) -> None:
    prompts = [[1 + (7 * i + n * i * i) % 40000 for i in range(n)] for n in (5, 33, 300)]
    expected = greedy_alone(
        resolve_model("smollm2-135m-instruct"),
        prompts,
        32,
        quantization="native",
        cpu=CpuOptions(activation_bits=8),
    )
    reply = httpx.post(
        f"{service.status()['http_url']}/v1/completions",
        json={
            "model": "smollm2-135m-instruct",
            "prompt": prompts,
            "max_tokens": 32,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        timeout=60,
        trust_env=False,
    ).json()
    assert [choice["token_ids"] for choice in reply["choices"]] == expected


def test_chat_streams_an_answer(service: Cli) -> None:
    result = service.run("chat", "What is the capital of Germany?", "--max-tokens", "20")
    assert "Berlin" in result.stdout, result.stdout + result.stderr


def test_a_second_start_of_the_same_service_is_refused_with_where_it_runs(service: Cli) -> None:
    for arguments in (("--detach",), ()):
        result = service.run("up", *arguments, *PORTS)
        assert result.returncode == 1
        assert f"service `pdserve` runs already (pid {service.status()['pid']}" in result.stderr


def test_a_taken_port_is_named_before_anything_starts(service: Cli) -> None:
    port = str(service.status()["http_url"]).rpartition(":")[2]
    result = service.run(
        "up", "--set", "service=other", "--set", f"http_port={port}", "--set", "grpc_port=0"
    )
    assert result.returncode == 1
    assert f"http_port {port} on 127.0.0.1 cannot be used" in result.stderr


def test_the_proxy_is_started_anew_on_the_same_ports(service: Cli) -> None:
    status = service.status()
    ports = json.loads((service.folder / "pdserve" / "ports.json").read_text())
    os.kill(ports["pid"], signal.SIGKILL)
    time.sleep(0.5)
    wait_for(lambda: service.status()["is_ready"] is True, 20)
    assert service.status()["http_url"] == status["http_url"]


def test_the_supervisor_is_no_driver_and_the_controller_is_restarted_without_one(
    service: Cli,
) -> None:
    supervisor = int(str(service.status()["pid"]))
    below = descendants(supervisor)
    (controller,) = (p for p in below if "ray::ControllerActor" in " ".join(p.arguments()))
    assert "worker.io" in threads_of(controller.pid), "what Ray calls a thread of each such process"
    assert "worker.io" not in threads_of(supervisor)
    workers = service.status()["workers"]
    controller.kill()

    wait_for(lambda: are_gone([controller]), 5)
    wait_for(lambda: service.run("status").returncode == 0, 30)
    assert identities(service.status()["workers"]) == identities(workers)


def threads_of(pid: int) -> list[str]:
    return [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]


def identities(workers: object) -> list[tuple[str, int]]:
    assert isinstance(workers, list)
    return [(worker["engine_id"], worker["pid"]) for worker in workers]


def test_scaling_adds_and_removes_workers_while_serving(service: Cli) -> None:
    assert service.run("scale", "prefiller=2", "decoder=2").stdout == "prefillers 2, decoders 2\n"
    workers = service.status()["workers"]
    assert isinstance(workers, list)
    assert len(workers) == 4
    result = service.run("scale", "prefiller=1", "decoder=1", "--grace", "2s")
    assert result.stdout == "prefillers 1, decoders 1\n", result.stderr


def test_bench_measures_without_errors(service: Cli) -> None:
    result = service.run(
        "bench",
        *("-n", "4", "--concurrency", "2", "--input-tokens", "40", "--output-tokens", "4"),
        *("--warmup", "0", "-o", "-"),
    )
    summary = json.loads(result.stdout)
    assert (summary["num_errors"], summary["num_output_tokens"]) == (0, 16)


def run_under_load(service: Cli, what: Callable[[], None], num_requests: int) -> dict[str, object]:
    """Do something while a load runs; return the load's summary."""
    with subprocess.Popen(
        service.command(
            "bench",
            *("-n", str(num_requests), "--concurrency", "4", "--warmup", "0", "-o", "-"),
            *("--input-tokens", "200", "--output-tokens", "24"),
        ),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as load:
        wait_for(lambda: num_inflight(service) > 0, 30)
        what()
        output, _ = load.communicate(timeout=120)
    summary: dict[str, object] = json.loads(output)
    return summary


def num_inflight(service: Cli) -> int:
    reply = httpx.get(f"{service.status()['http_url']}/pdserve/status", trust_env=False)
    return int(reply.json()["num_inflight_requests"])


def prefiller_of(service: Cli) -> dict[str, object]:
    workers = service.status()["workers"]
    assert isinstance(workers, list)
    return next(w for w in workers if w["engine_id"] == "prefiller-0")


def test_a_killed_prefiller_hurts_no_client_and_serves_again(service: Cli) -> None:
    before = prefiller_of(service)

    def kill() -> None:
        os.kill(int(str(before["pid"])), signal.SIGKILL)

    summary = run_under_load(service, kill, num_requests=24)
    assert (summary["num_errors"], summary["num_output_tokens"]) == (0, 24 * 24)

    def is_back() -> bool:
        now = prefiller_of(service)
        return now["state"] == "ready" and now["pid"] != before["pid"]

    wait_for(is_back, 60)
    url = f"{service.status()['http_url']}/pdserve/status"

    def has_served() -> bool:
        workers = httpx.get(url, trust_env=False).json()["workers"]
        if any(w["role"] == "prefiller" and w["num_computed_tokens"] for w in workers):
            return True
        run_under_load(service, lambda: None, num_requests=4)
        return False

    wait_for(has_served, 60)


def test_scaling_under_load_hurts_no_client(service: Cli) -> None:
    def scale() -> None:
        for numbers in (("prefiller=2", "decoder=2"), ("prefiller=1", "decoder=1")):
            assert service.run("scale", *numbers, "--grace", "5s").returncode == 0

    summary = run_under_load(service, scale, num_requests=80)
    assert (summary["num_errors"], summary["num_output_tokens"]) == (0, 80 * 24)


@pytest.mark.parametrize("when_s", [0.0, 3.0])
def test_ctrl_c_during_the_start_stops_everything(tmp_path: Path, when_s: float) -> None:
    cli = Cli(tmp_path)
    with subprocess.Popen(
        cli.command("up", *PORTS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wait_for((tmp_path / "pdserve" / "state.json").exists, 30)
        time.sleep(when_s)
        pids = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=40)
    assert "Traceback" not in output
    wait_for(lambda: are_gone(pids), 5)


@pytest.mark.parametrize("actor", ["ControllerActor", "WorkerActor"])
def test_a_ray_that_ends_during_the_start_ends_it_at_once(tmp_path: Path, actor: str) -> None:
    """As an out-of-memory killer does it, before there are workers and once there are."""
    cli = Cli(tmp_path)
    with subprocess.Popen(
        cli.command("up", *PORTS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:

        def has_actor() -> bool:
            return any(actor in " ".join(p.arguments()) for p in descendants(process.pid))

        wait_for(has_actor, 60)
        processes = descendants(process.pid)
        (raylet,) = (p for p in processes if p.name() == "raylet")
        raylet.kill()
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "error: Ray has ended\n" in output
    wait_for(lambda: are_gone(processes), 5)
    assert not {"ray_folder", "ray_processes", "state.json"} & {
        path.name for path in (tmp_path / "pdserve").iterdir()
    }


def test_nothing_outlives_a_killed_supervisor_or_a_killed_ray(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    assert cli.run("up", "--detach", *PORTS).returncode == 0
    supervisor = int(str(cli.status()["pid"]))
    processes = descendants(supervisor)
    ray_folder = Path((tmp_path / "pdserve" / "ray_folder").read_text())
    os.kill(supervisor, signal.SIGKILL)
    result = cli.run("status")
    assert (result.returncode, "no service" in result.stderr) == (1, True)
    assert cli.run("up", "--detach", *PORTS).returncode == 0
    assert not ray_folder.exists()
    wait_for(lambda: are_gone(processes), 5)

    supervisor = int(str(cli.status()["pid"]))
    processes = descendants(supervisor)
    (raylet,) = (process for process in processes if process.name() == "raylet")
    raylet.kill()
    wait_for(lambda: not is_alive(supervisor) and are_gone(processes), 40)
    assert "Ray has ended: stopping" in (tmp_path / "pdserve" / "supervisor.log").read_text()
    assert not (tmp_path / "pdserve" / "ray_folder").exists()
