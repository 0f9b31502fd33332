"""The end of a service from another terminal."""

import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pdserve.config_file import load_config
from pdserve.detach import start_detached, stop_running
from pdserve.errors import StartFailed
from pdserve.launch import Plan, _Supervisor, run_service
from pdserve.processes import is_alive
from pdserve.state import StateFolder

ROOT = Path(__file__).parents[2]
HUNG = """
import os, signal, subprocess, sys, time
from pathlib import Path
from pdserve.leftovers import make_ray_folder, note_processes
from pdserve.state import ServiceState, StateFolder

folder = StateFolder(Path(sys.argv[1]), "s")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with folder.locked():
    worker = subprocess.Popen(["sleep", "300"], start_new_session=True)
    note_processes(folder.path)
    ray_folder = make_ray_folder(folder.path)
    folder.write(ServiceState(
        service="s", status="ready", pid=os.getpid(), model="m", host="127.0.0.1", http_port=1,
        grpc_port=2, controller_address="127.0.0.1:3", needs_key=False, token="t",
    ))
    print(worker.pid, ray_folder, flush=True)
    time.sleep(300)
"""


def test_a_supervisor_that_hangs_is_killed_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.detach._STOP_TIMEOUT_S", 0.3)
    with subprocess.Popen(
        [sys.executable, "-c", HUNG, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as supervisor:
        assert supervisor.stdout is not None
        worker_pid, ray_folder = supervisor.stdout.readline().split()
        stop_running(StateFolder(tmp_path, "s"), Console(quiet=True))
        assert supervisor.wait(5) < 0
    assert not is_alive(int(worker_pid))
    assert not Path(ray_folder).exists()
    assert StateFolder(tmp_path, "s").read() is None


def test_a_start_that_comes_second_leaves_the_log_of_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StateFolder(tmp_path, "s")
    monkeypatch.setattr(StateFolder, "check_free", lambda _: None)
    ports = [f"--set={name}_port=0" for name in ("http", "grpc")]
    with folder.locked():
        folder.log_path.write_text("the first has begun\n")
        with pytest.raises(StartFailed) as failure:
            start_detached(
                ["--state-dir", str(tmp_path), "--set", "service=s", *ports], folder, Console()
            )
        assert "service `s` runs already" in str(failure.value)
        assert "the first" not in str(failure.value)
        assert folder.log_path.read_text().startswith("the first has begun\n")


def test_the_supervisor_with_the_lock_begins_a_new_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = StateFolder(tmp_path, "s")
    folder.path.mkdir()
    folder.log_path.write_text("an earlier service\n")
    monkeypatch.setattr(_Supervisor, "run", lambda _: None)
    plan = Plan(config=load_config(None), model_path=tmp_path, token="t", controller_port=1)
    run_service(plan, folder, Console(quiet=True))
    assert folder.log_path.read_text() == ""
