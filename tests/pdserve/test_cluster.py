"""cluster.yaml with the real `ray up` and `ray down`, against an sshd of our own on loopback.

NOTE: the sshd, and so the whole "host", runs in a PID namespace of its own: `ray stop` ends every
Ray process that it sees, and must see only those. When the namespace's first process is killed, the
kernel ends all others in it.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parent.parent.parent
ADDRESS = "127.0.0.2"
SSHD = "/usr/sbin/sshd"
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
BIN = Path(sys.executable).parent


def read_cluster() -> dict[str, Any]:
    cluster: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    return cluster


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@dataclass(frozen=True)
class Host:
    """A folder that is the home of a "host", and the key that opens it."""

    home: Path
    key: Path
    sshd: "subprocess.Popen[bytes]"


def why_not_here() -> str:
    """The reason why this machine cannot be its own cluster; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for sshd and a PID namespace"
    missing = [
        tool for tool in (SSHD, "ssh", "ssh-keygen", "rsync", "unshare") if not shutil.which(tool)
    ]
    if missing:
        return f"needs {', '.join(missing)}"
    with socket.socket() as listener:
        try:
            listener.bind((ADDRESS, 22))
        except OSError as error:
            return f"{ADDRESS}:22 cannot be bound: {error.strerror}"
    namespace = subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True)
    return "" if namespace.returncode == 0 else "PID namespaces are not allowed here"


@contextmanager
def running_sshd(home: Path) -> Iterator[Host]:
    """An sshd that knows one key and takes every session to `home`."""
    for name in ("host_key", "key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)]
        subprocess.run(command, check=True, timeout=30)
    (home / ".bashrc").touch()
    enter = home / "enter"
    # NOTE: sshd takes HOME from the password file; Ray's files have to stay out of the real one.
    enter.write_text(
        f"#!/bin/sh\nexport HOME={home} RAY_TMPDIR={home}/r\ncd\n"
        'exec bash -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    enter.chmod(0o755)
    config = home / "sshd_config"
    config.write_text(
        f"Port 22\nListenAddress {ADDRESS}\nHostKey {home}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {home}/key.pub\nStrictModes no\nUsePAM no\nLogLevel ERROR\n"
        f"PasswordAuthentication no\nPermitRootLogin prohibit-password\nForceCommand {enter}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    with (home / "sshd.log").open("wb") as log:
        sshd = subprocess.Popen(
            [*NAMESPACE, SSHD, "-D", "-e", "-f", str(config)],
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield Host(home, home / "key", sshd)
    finally:
        sshd.kill()
        sshd.wait(10)


@pytest.fixture
def host() -> Iterator[Host]:
    if reason := why_not_here():
        pytest.skip(reason)
    # A short path: Ray's sockets are below it.
    home = Path(tempfile.mkdtemp(prefix="pdh", dir="/tmp"))
    try:
        with running_sshd(home) as running:
            yield running
    finally:
        shutil.rmtree(home, ignore_errors=True)


def write_cluster(host: Host, http_port: int) -> Path:
    """cluster.yaml as a user would fill it in; what is installed already stays installed."""
    cluster = read_cluster()
    cluster["provider"] |= {"head_ip": ADDRESS, "worker_ips": []}
    cluster["auth"]["ssh_private_key"] = str(host.key)
    (host.home / "pdserve").mkdir()
    (host.home / "pdserve" / ".venv").symlink_to(sys.prefix)
    is_made = subprocess.run(
        ["make", "-q", f"VENV={sys.prefix}", f"{sys.prefix}/stamps/runtime"],
        cwd=ROOT,
        check=False,
        capture_output=True,
    )
    if is_made.returncode != 0:
        # This environment was not made by make: it would be made anew, in place.
        cluster["setup_commands"] = cluster["setup_commands"][1:]
    ray_port, options = free_port(), f"--set http_port={http_port} --set grpc_port=0"
    cluster["head_start_ray_commands"] = [
        command.replace("6379", str(ray_port)).replace("up --detach", f"up --detach {options}")
        for command in cluster["head_start_ray_commands"]
    ]
    path = host.home / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return path


def ray_cli(host: Host, *arguments: str) -> None:
    """Run the launcher itself with its files in the host's folder too."""
    own = {"HOME": host.home, "RAY_TMPDIR": host.home / "l", "TMPDIR": host.home / "l"}
    environment = os.environ | {name: str(path) for name, path in own.items()}
    result = subprocess.run(
        [str(BIN / "ray"), *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    log = (host.home / "sshd.log").read_text()
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{log}"


def test_cluster_yaml_is_what_ray_up_accepts() -> None:
    validate_config(prepare_config(read_cluster()))


@pytest.mark.e2e
def test_ray_up_serves_a_request_and_ray_down_ends_it(host: Host) -> None:
    http_port = free_port()
    cluster = write_cluster(host, http_port)
    (host.home / "l").mkdir()
    ray_cli(host, "up", "-y", "--no-config-cache", str(cluster))
    url = f"http://127.0.0.1:{http_port}/v1/chat/completions"
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "What is the capital of Germany?"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    reply = httpx.post(url, json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    assert "Berlin" in reply.json()["choices"][0]["message"]["content"]
    ray_cli(host, "down", "-y", str(cluster))
    deadline_s = time.monotonic() + 30
    while is_open(http_port):
        assert time.monotonic() < deadline_s, "the proxy is still there"
        time.sleep(0.2)


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
