"""The proxy as a child process."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from pdserve.errors import StartFailed
from pdserve.proxy_process import ProxyProcess
from proxy.config import ProxyConfig


def test_a_proxy_that_cannot_start_says_why_in_the_error(tmp_path: Path) -> None:
    config = ProxyConfig(
        http_port=0,
        grpc_port=0,
        model_path=str(tmp_path / "no-such-model"),
        served_model_names=("m",),
        controller_address="127.0.0.1:1",
    )
    with (tmp_path / "log").open("a") as log:
        proxy = ProxyProcess(config, tmp_path, log)
        proxy.start()
        with pytest.raises(StartFailed, match=r"ended with status 1: .*No such file"):
            _wait_for_ports(proxy)


def test_a_proxy_that_cannot_be_started_anew_now_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.proxy_process._BACKOFF_MAX_S", 0.05)
    folder = tmp_path / "state"
    folder.mkdir()
    config = ProxyConfig(model_path="", served_model_names=("m",), controller_address="127.0.0.1:1")
    with (tmp_path / "log").open("a") as log:
        proxy = ProxyProcess(config, folder, log)
        proxy.start()
        proxy.wait(0)
        # As on a full disk: its configuration cannot be written.
        shutil.rmtree(folder)
        for _ in range(3):
            proxy.supervise()
            time.sleep(0.1)
        assert not (tmp_path / "state").exists()
        folder.mkdir()
        proxy.supervise()
        assert (folder / "proxy.json").exists()
        proxy.wait(0)


def test_a_proxy_that_does_not_answer_for_long_is_killed_and_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.proxy_process._SILENCE_S", 0.2)
    config = ProxyConfig(model_path="", served_model_names=("m",), controller_address="127.0.0.1:1")
    with (tmp_path / "log").open("a") as log:
        proxy = ProxyProcess(config, tmp_path, log)
        proxy.start()
        process = proxy._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        for answered in (False, True, False):
            proxy.note_answer(answered)
            time.sleep(0.15)
        assert process.poll() is None, "an answer in between starts the time anew"
        time.sleep(0.1)
        proxy.note_answer(False)
        assert process.wait(5) == -signal.SIGKILL
        proxy.supervise()
        assert proxy._process is not process
        proxy.wait(0)


def _wait_for_ports(proxy: ProxyProcess) -> None:
    deadline_s = time.monotonic() + 30
    while proxy.ports() is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
