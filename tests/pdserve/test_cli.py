"""The command line without a service: messages and exit codes."""

import pwd
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import yaml
from typer.testing import CliRunner

from pdserve.cli import app
from pdserve.errors import BadModel, ConfigError, ServiceNotRunning
from pdserve.scaling import parse_numbers
from pdserve.state import StateFolder


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pdserve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("setting", ["quantization=none", "quantization=int4", "ops=reference"])
def test_config_prints_what_it_would_read_again(setting: str, tmp_path: Path) -> None:
    settings = ["--set", "decoder.replicas=3", "--set", setting]
    result = CliRunner().invoke(app, ["config", *settings, "--resolved"])
    assert result.exit_code == 0, result.output
    path = tmp_path / "again.yaml"
    path.write_text(result.output)
    again = CliRunner().invoke(app, ["config", "-c", str(path), "--resolved"])
    assert again.output == result.output
    assert yaml.safe_load(result.output)["decoder"]["replicas"] == 3


def test_config_checks_a_model_that_is_at_hand(tmp_path: Path) -> None:
    def config(*arguments: str) -> Exception | None:
        result = CliRunner().invoke(app, ["config", *arguments, "--set", "max_model_len=8193"])
        return result.exception  # type: ignore[return-value]

    problem = config()
    assert isinstance(problem, ConfigError)
    assert "the model takes 8192 tokens at most" in str(problem)
    assert config("--model", "someone/something") is None
    assert config("--model", str(tmp_path / "not yet there")) is None
    (tmp_path / "config.json").write_text("{}")
    assert isinstance(config("--model", str(tmp_path)), BadModel)


def test_config_says_when_it_did_not_check_the_model() -> None:
    result = CliRunner().invoke(app, ["config", "--model", "/no/such"])
    assert (result.exit_code, yaml.safe_load(result.stdout)["model"]) == (0, "/no/such")
    assert result.stderr == "the model was not checked: /no/such is not on this machine\n"
    assert CliRunner().invoke(app, ["config"]).stderr == ""


def test_a_wrong_configuration_ends_with_status_2_and_one_line_per_problem() -> None:
    result = run("up", "--set", "http_prot=1", "--set", "decoder.replicsa=2")
    assert result.returncode == 2
    assert sorted(result.stderr.splitlines()) == [
        "error: decoder.replicsa: unknown key; did you mean `decoder.replicas`?",
        "error: http_prot: unknown key; did you mean `http_port`?",
    ]


def test_an_unknown_model_ends_with_status_1_before_anything_starts(tmp_path: Path) -> None:
    result = run("up", "--model", "no such model", "--state-dir", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("error: model no such model is no packaged model")


@pytest.mark.parametrize("command", ["status", "down", "scale decoder=2", "chat hi", "bench"])
def test_commands_say_so_when_no_service_runs(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*command.split(" "), "--state-dir", str(tmp_path)])
    assert isinstance(result.exception, ServiceNotRunning)
    assert "pdserve up" in str(result.exception)


def test_a_state_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("up", "--set", "http_port=0", "--state-dir", str(tmp_path / "file" / "x"))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert f"'{tmp_path}/file/x" in result.stderr


@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_a_user_without_a_home_is_told_what_to_do(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_entry(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    result = CliRunner().invoke(app, [command])
    assert isinstance(result.exception, ConfigError)
    assert "there is no home: use --state-dir" in str(result.exception)


def with_open_files(soft: int, hard: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Python with `arguments`, under these limits."""
    return subprocess.run(
        ["prlimit", f"--nofile={soft}:{hard}", sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_too_few_open_files_are_said_before_anything_starts(tmp_path: Path) -> None:
    ports = ("--set", "http_port=0", "--set", "grpc_port=0", "--state-dir", str(tmp_path))
    result = with_open_files(100, 100, "-m", "pdserve", "up", *ports)
    assert result.returncode == 1
    assert result.stderr.startswith("error: a process may have 100 files open (ulimit -Hn)")


@pytest.mark.parametrize(("soft", "hard", "expected"), [(200, 300, 300), (300, 300, 300)])
def test_a_service_may_open_what_the_system_allows(soft: int, hard: int, expected: int) -> None:
    code = (
        "import resource; from pdserve.launch import raise_open_files; raise_open_files();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    assert with_open_files(soft, hard, "-c", code).stdout.strip() == str(expected)


def test_a_ray_cluster_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    ports = ("--set", "http_port=0", "--set", "grpc_port=0")
    address = f"127.0.0.1:{free_port()}"
    result = run("up", "--set", f"ray.address={address}", *ports, "--state-dir", str(tmp_path))
    assert result.returncode == 1
    assert f"error: ray.address {address} cannot be reached: Connection refused" in result.stderr


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def test_scale_takes_roles_and_numbers() -> None:
    assert parse_numbers(["prefiller=2", "decoder=3"]) == (2, 3)
    assert parse_numbers(["prefiller=0"]) == (0, None)
    with pytest.raises(ConfigError) as caught:
        parse_numbers(["decoder=0", "worker=1", "prefiller=-1", "decoder"])
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match="decoder=2 is not allowed: decoder is 1 already"):
        parse_numbers(["decoder=1", "decoder=2"])
    result = CliRunner().invoke(app, ["scale", "decoder=1", "--grace", "100000h"])
    assert "--grace 100000h is not allowed: at most 604800 s" in str(result.exception)


def test_asking_for_the_status_does_not_import_ray_or_torch() -> None:
    code = (
        "import sys, pdserve.cli, pdserve.client, pdserve.display, pdserve.detach;"
        "print([name for name in ('ray', 'torch') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_a_second_up_names_the_running_service_and_not_its_ports(
    tmp_path: Path, detach: tuple[str, ...]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).touch()
    folder = StateFolder(tmp_path, "pdserve")
    with folder.locked(), socket.create_server(("127.0.0.1", 0)) as listener:
        ports = f"http_port={listener.getsockname()[1]}"
        place = ("--state-dir", str(tmp_path), "--model", str(model))
        result = run("up", *detach, "--set", ports, *place)
    assert result.returncode == 1
    assert "service `pdserve` runs already" in result.stderr
