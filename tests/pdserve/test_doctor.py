"""The doctor on machines made of files, and on this one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.doctor import Finding, Machine, Verdict, examine

VERSIONS = {
    "torch": "2.13.0+cpu",
    "torch-npu": "2.13.0",
    "ray": "2.60.0",
    "mooncake-transfer-engine-non-cuda": "0.3.13.post1",
}
LIBRARIES = "libibverbs.so.1 librdmacm.so.1 libnuma.so.1"


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def ascend_root(tmp_path: Path) -> Path:
    """A host with two NPUs where all is well."""
    for name in ("davinci0", "davinci1", "davinci_manager"):
        write(tmp_path / "dev" / name)
    write(tmp_path / "usr/local/Ascend/driver/version.info", "Version=25.2.0\nother=1\n")
    write(
        tmp_path / "usr/local/Ascend/ascend-toolkit/latest/version.cfg",
        "# version\nruntime_running_version=[8.3.0:8.3.RC1]\n",
    )
    write(
        tmp_path / "etc/hccn.conf",
        "address_0=10.0.0.1\nnetmask_0=255.255.0.0\naddress_1=10.0.0.2\n",
    )
    write(tmp_path / "usr/local/Ascend/driver/tools/hccn_tool")
    return tmp_path


def machine(root: Path, **changes: Any) -> Machine:
    def run(command: list[str]) -> str:
        return LIBRARIES if "ldconfig" in command[0] else "link status: UP\n"

    home = root / "usr/local/Ascend/ascend-toolkit/latest"
    values: dict[str, Any] = {
        "environment": {"ASCEND_HOME_PATH": str(home)},
        "root": root,
        "run": run,
        "version": VERSIONS.get,
        "can_bind": lambda port: True,
        "which": lambda name: "/usr/bin/g++",
        "ports": {"http_port": 8000, "grpc_port": 0},
    }
    return Machine(**(values | changes))


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {f.subject: f.text for f in findings if f.verdict is Verdict.WRONG}


def test_an_ascend_host_in_order_has_nothing_wrong(ascend_root: Path) -> None:
    findings = examine(machine(ascend_root))
    assert wrong(findings) == {}
    said = {f.subject: f.text for f in findings}
    assert said["NPU"] == "2: 0, 1"
    assert said["driver"] == "25.2.0"
    assert said["CANN"].startswith("8.3.RC1 in ")
    assert said["HCCN 1"] == "10.0.0.2, link up"
    assert said["http_port"] == "8000 is free"


def test_a_machine_without_an_npu_is_not_at_fault(tmp_path: Path) -> None:
    findings = examine(machine(tmp_path, version=(VERSIONS | {"torch-npu": None}).get))
    assert wrong(findings) == {}
    (npu,) = [f for f in findings if f.subject == "NPU"]
    assert npu.verdict is Verdict.NOTE
    assert "nothing is wrong with that" in npu.text
    assert not {"driver", "CANN", "torch_npu", "HCCN"} & {f.subject for f in findings}


@pytest.mark.parametrize(
    ("file", "subject"),
    [
        ("usr/local/Ascend/driver/version.info", "driver"),
        ("usr/local/Ascend/ascend-toolkit/latest/version.cfg", "CANN"),
        ("etc/hccn.conf", "HCCN"),
    ],
)
def test_what_is_missing_on_an_ascend_host_is_named(
    ascend_root: Path, file: str, subject: str
) -> None:
    (ascend_root / file).unlink()
    assert set(wrong(examine(machine(ascend_root)))) == {subject}


def test_a_link_that_is_down_is_named(ascend_root: Path) -> None:
    found = wrong(examine(machine(ascend_root, run=lambda command: "link status: DOWN\n")))
    assert found == {"HCCN 0": "10.0.0.1, link not up", "HCCN 1": "10.0.0.2, link not up"}


def test_an_npu_without_an_address_is_named(ascend_root: Path) -> None:
    write(ascend_root / "etc/hccn.conf", "address_0=10.0.0.1\n")
    assert list(wrong(examine(machine(ascend_root)))) == ["HCCN 1"]


@pytest.mark.parametrize(
    ("changes", "subject", "text"),
    [
        ({"version": (VERSIONS | {"torch-npu": "2.12.0"}).get}, "torch_npu", "does not fit torch"),
        ({"version": (VERSIONS | {"torch-npu": None}).get}, "torch_npu", "not installed"),
        ({"version": (VERSIONS | {"ray": None}).get}, "ray", "make install"),
        ({"ports": {"http_port": 21500}}, "http_port", "transfer ports, 20000 to 21999"),
    ],
)
def test_what_does_not_fit_is_named(
    ascend_root: Path, changes: dict[str, Any], subject: str, text: str
) -> None:
    found = wrong(examine(machine(ascend_root, **changes)))
    assert list(found) == [subject]
    assert text in found[subject]


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("HCCL_BUFFSIZE", "lots", "lots is not allowed: a number of MiB"),
        ("ASCEND_LAUNCH_BLOCKING", "1", "graphs cannot be captured"),
    ],
)
def test_a_variable_that_cannot_be_is_named(
    ascend_root: Path, variable: str, value: str, text: str
) -> None:
    given = machine(ascend_root)
    environment = {**given.environment, variable: value}
    found = wrong(examine(machine(ascend_root, environment=environment)))
    assert list(found) == [variable]
    assert text in found[variable]


def test_the_command_reports_on_this_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pdserve",
            "doctor",
            "--json",
            "--set",
            "http_port=0",
            "--set",
            "grpc_port=0",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    findings = {f["subject"]: f for f in json.loads(done.stdout)}
    assert findings["torch"]["verdict"] == "ok"
    assert done.returncode == int(any(f["verdict"] == "wrong" for f in findings.values()))
