"""What is noted of a running service: for its owner only, and never stale."""

import fcntl
import io
import os
import re
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pdserve.display import command_line, print_banner
from pdserve.errors import ServiceExists, ServiceNotRunning, StateDamaged
from pdserve.state import ServiceState, StateFolder

STATE = ServiceState(
    service="s",
    status="ready",
    pid=os.getpid(),
    model="m",
    host="127.0.0.1",
    http_port=1,
    grpc_port=2,
    controller_address="127.0.0.1:3",
    needs_key=False,
    token="secret",
)


@pytest.mark.parametrize(
    ("service", "place", "options"),
    [
        ("pdserve", "~/.pdserve", ""),
        ("two", "~/.pdserve", " --service two"),
        ("pdserve", "/var/a b", " --state-dir '/var/a b'"),
        ("two", "/var/x", " --service two --state-dir /var/x"),
    ],
)
def test_commands_are_shown_with_what_finds_the_service(
    service: str, place: str, options: str
) -> None:
    root = str(Path(place).expanduser())
    assert command_line("down", service, root).endswith(f"pdserve down{options}")
    state = replace(STATE, service=service, root=root)
    console = Console(file=io.StringIO())
    print_banner(console, state, (1, 1), 2.0)
    assert f"pdserve chat{options} 'Why is the sky blue?'" in console.file.getvalue()


def test_messages_name_the_service_and_where_it_is_noted(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "s")
    start = f"pdserve up --set service=s --state-dir {tmp_path}"
    with pytest.raises(ServiceNotRunning, match=f"start it: {re.escape(start)}$"):
        folder.read_running()
    with folder.locked():
        folder.write(STATE)
        assert folder.read_running().root == str(tmp_path)
        stop = f"`pdserve down --service s --state-dir {tmp_path}`"
        with pytest.raises(ServiceExists, match=re.escape(stop)):
            folder.check_free()


def test_a_living_service_is_found_and_a_second_one_refused_with_where_it_is(
    tmp_path: Path,
) -> None:
    folder = StateFolder(tmp_path, "s")
    with folder.locked():
        folder.write(STATE)
        assert StateFolder(tmp_path, "s").read_running() == STATE
        with (
            pytest.raises(ServiceExists, match=r"http://127\.0\.0\.1:1"),
            StateFolder(tmp_path, "s").locked(),
        ):
            pass
    assert folder.read() is None


def test_asking_for_a_service_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "s")
    folder.path.mkdir()
    with (folder.path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as is_locked does, for longer
        timer = threading.Timer(0.2, fcntl.flock, (lock, fcntl.LOCK_UN))
        timer.start()
        with folder.locked():
            assert folder.is_locked()
        timer.join()


def test_what_a_killed_supervisor_left_is_not_taken_for_a_service(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "s")
    folder.path.mkdir()
    folder.write(STATE)
    with pytest.raises(ServiceNotRunning):
        folder.read_running()


def test_a_damaged_note_of_a_living_service_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "s")
    with folder.locked():
        for content in ("", "{}", "[1]", '{"service": "s"'):
            (folder.path / "state.json").write_text(content)
            with pytest.raises(StateDamaged, match=r"state\.json is damaged"):
                folder.read()


def test_only_the_owner_may_read_the_token(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "s")
    with folder.locked():
        folder.write(STATE)
        assert stat.S_IMODE((folder.path / "state.json").stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("10.1.2.3", "http://10.1.2.3:1"),
    ],
)
def test_the_url_is_one_that_works_on_this_machine(host: str, url: str) -> None:
    assert replace(STATE, host=host).http_url == url
