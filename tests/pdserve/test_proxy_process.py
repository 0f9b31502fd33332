"""The proxy as a child process."""

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


def _wait_for_ports(proxy: ProxyProcess) -> None:
    deadline_s = time.monotonic() + 30
    while proxy.ports() is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
