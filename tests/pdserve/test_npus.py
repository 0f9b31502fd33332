"""NPUs as Ray hands them out, and what a service with NPUs may not say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.ascend.environment import HCCLConfig, worker_variables
from pdserve.config import ServiceConfig
from pdserve.config_file import load_config
from pdserve.errors import ConfigError

ROOT = Path(__file__).parents[2]
ALL_SET = ["ops=npu", "block_size=128", "ray.npus_per_worker=1", "transfer.checksum=off"]


@pytest.mark.multiprocess
def test_each_worker_has_an_npu_of_its_own_before_anything_loads_torch() -> None:
    # In a process of its own: Ray's own accelerator support counts a machine's NPUs once.
    done = subprocess.run(
        [sys.executable, "-m", "tests.pdserve.npu_probe"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first["pid"] != second["pid"]
    visible = {info["seen"]["ASCEND_RT_VISIBLE_DEVICES"] for info in (first, second)}
    assert visible == {"0", "1"}
    for info in (first, second):
        assert info["seen"]["HCCL_BUFFSIZE"] == "512"
        assert info["loaded"] == []


def test_hccl_is_told_by_its_variables() -> None:
    config = HCCLConfig(buffer_mib=1024, connect_timeout_s=600, exec_timeout_s=1800)
    assert config.variables("10.0.0.7", {}) == {
        "HCCL_BUFFSIZE": "1024",
        "HCCL_CONNECT_TIMEOUT": "600",
        "HCCL_EXEC_TIMEOUT": "1800",
        "HCCL_EVENT_TIMEOUT": "1832",
        "HCCL_IF_IP": "10.0.0.7",
    }


@pytest.mark.parametrize(
    ("config", "host", "given", "expected"),
    [
        (HCCLConfig(), "127.0.0.1", {}, {}),
        (HCCLConfig(), "10.0.0.7", {"HCCL_SOCKET_IFNAME": "eth1"}, {}),
        (HCCLConfig(), "10.0.0.7", {"HCCL_IF_IP": "10.1.0.7"}, {}),
        (HCCLConfig(socket_ifname="eth0"), "10.0.0.7", {}, {"HCCL_SOCKET_IFNAME": "eth0"}),
    ],
)
def test_an_address_never_stands_beside_an_interface(
    config: HCCLConfig, host: str, given: dict[str, str], expected: dict[str, str]
) -> None:
    assert config.variables(host, given) == expected


def test_a_worker_without_npus_is_told_nothing() -> None:
    worker = {"ops_backend": "cpu", "hccl": {"buffer_mib": 512}}
    assert worker_variables(worker, "10.0.0.7", {}) == {}


def load(*overrides: str) -> ServiceConfig:
    return load_config(None, overrides)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("ray.npus_per_worker=0", "ray.npus_per_worker is 0 with ops npu: all workers would take"),
        ("block_size=32", "block_size is 32, ops npu takes 128 and no other"),
        ("transfer.checksum=full", "transfer.checksum is full: the host cannot read an NPU's"),
        ("hccl.connect_timeout_s=60", "hccl.connect_timeout_s"),
    ],
)
def test_what_cannot_be_with_npus_is_refused_at_once(changed: str, message: str) -> None:
    assert load(*ALL_SET, "hccl.buffer_mib=400").hccl.buffer_mib == 400
    with pytest.raises(ConfigError, match=message):
        load(*ALL_SET, changed)
