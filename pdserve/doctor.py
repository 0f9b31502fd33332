"""`pdserve doctor`: does this machine have what pdserve runs on, and what does it lack?

Looks at files, versions and the environment; starts nothing and loads neither torch nor CANN. On a
machine without an NPU that is no fault: everything then runs on the CPU.
"""

import importlib.metadata
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kernels.ascend.hccl import DEFAULT_BUFFER_MIB

_DRIVER = "usr/local/Ascend/driver/version.info"
_TOOLKITS = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/latest")
_HCCN = "etc/hccn.conf"
_HCCN_TOOLS = ("usr/local/Ascend/driver/tools/hccn_tool", "usr/bin/hccn_tool")
_LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1")
_TRANSFER_BASE_PORT = 20000
_TRANSFER_PORTS_PER_NPU = 1000
_MIN_BUFFER_MIB = 1
_TOOL_TIMEOUT_S = 10.0


class Verdict(Enum):
    """What a finding means."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    verdict: Verdict
    text: str


def _run(command: list[str]) -> str:
    """What a tool prints; empty if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where the doctor looks; tests give it a machine of their own."""

    environment: Mapping[str, str]
    root: Path = Path("/")
    run: Callable[[list[str]], str] = _run
    version: Callable[[str], str | None] = _version
    can_bind: Callable[[int], bool] = _can_bind
    which: Callable[[str], str | None] = shutil.which
    ports: Mapping[str, int] = field(default_factory=dict)
    """The service's own, by setting; 0 is any."""

    @property
    def npus(self) -> list[int]:
        """Numbers of the device files."""
        names = (path.name for path in (self.root / "dev").glob("davinci*"))
        return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"davinci(\d+)", name)))


def examine(machine: Machine) -> list[Finding]:
    """Everything that can be said, software first."""
    findings = [*_software(machine), *_ports(machine)]
    if not machine.npus:
        text = "none on this machine, and nothing is wrong with that: pdserve computes on the CPU"
        return [*findings, Finding("NPU", Verdict.NOTE, text)]
    text = f"{len(machine.npus)}: {', '.join(map(str, machine.npus))}"
    return [
        *findings,
        Finding("NPU", Verdict.OK, text),
        _driver(machine),
        _cann(machine),
        _torch_npu(machine),
        *_links(machine),
        *_hccl(machine),
    ]


def _software(machine: Machine) -> list[Finding]:
    findings = []
    for package in ("torch", "ray", "mooncake-transfer-engine-non-cuda"):
        version = machine.version(package)
        if version is not None:
            findings.append(Finding(package, Verdict.OK, version))
        elif package == "mooncake-transfer-engine-non-cuda":
            text = "not installed: KV moves on the same host only"
            findings.append(Finding(package, Verdict.NOTE, text))
        else:
            findings.append(Finding(package, Verdict.WRONG, "not installed: run `make install`"))
    if machine.which("g++") is None:
        text = "there is no g++: pdserve computes with plain PyTorch, which is slow"
        findings.append(Finding("compiler", Verdict.NOTE, text))
    known = machine.run(["ldconfig", "-p"]) or machine.run(["/sbin/ldconfig", "-p"])
    if missing := [name for name in _LIBRARIES if known and name not in known]:
        text = f"missing: {', '.join(missing)}, which Mooncake needs"
        findings.append(Finding("libraries", Verdict.NOTE, text))
    return findings


def _ports(machine: Machine) -> list[Finding]:
    findings = []
    first = int(machine.environment.get("ASCEND_BASE_PORT") or _TRANSFER_BASE_PORT)
    last = first + _TRANSFER_PORTS_PER_NPU * len(machine.npus) - 1
    for name, port in machine.ports.items():
        if port == 0:
            continue
        if first <= port <= last:
            text = f"{port} is one of the NPUs' transfer ports, {first} to {last}"
            findings.append(Finding(name, Verdict.WRONG, text))
        elif machine.can_bind(port):
            findings.append(Finding(name, Verdict.OK, f"{port} is free"))
        else:
            findings.append(Finding(name, Verdict.NOTE, f"{port} is in use"))
    return findings


def _driver(machine: Machine) -> Finding:
    version = _field(machine.root / _DRIVER, "Version")
    if version is None:
        return Finding("driver", Verdict.WRONG, f"no version in {machine.root / _DRIVER}")
    return Finding("driver", Verdict.OK, version)


def _cann(machine: Machine) -> Finding:
    home = machine.environment.get("ASCEND_HOME_PATH")
    folders = [Path(home)] if home else [machine.root / folder for folder in _TOOLKITS]
    for folder in folders:
        for name in ("version.cfg", "compiler/version.info", "runtime/version.info"):
            for key in ("Version", "runtime_running_version", "toolkit_running_version"):
                if version := _field(folder / name, key):
                    set_up = "" if home else "; source its set_env.sh before `pdserve up`"
                    verdict = Verdict.OK if home else Verdict.WRONG
                    return Finding("CANN", verdict, f"{version} in {folder}{set_up}")
    where = ", ".join(map(str, folders))
    return Finding("CANN", Verdict.WRONG, f"not found in {where}; is ASCEND_HOME_PATH set?")


def _torch_npu(machine: Machine) -> Finding:
    torch, torch_npu = machine.version("torch"), machine.version("torch-npu")
    if torch_npu is None:
        text = f"not installed: needs the version of torch, {torch}"
        return Finding("torch_npu", Verdict.WRONG, text)
    if torch is None or _release(torch) != _release(torch_npu):
        text = f"{torch_npu} does not fit torch {torch}: both must be of one release"
        return Finding("torch_npu", Verdict.WRONG, text)
    return Finding("torch_npu", Verdict.OK, torch_npu)


def _links(machine: Machine) -> list[Finding]:
    conf = machine.root / _HCCN
    if not conf.is_file():
        text = f"{conf} is missing: NPUs have no address for transfers between hosts"
        return [Finding("HCCN", Verdict.WRONG, text)]
    text = conf.read_text(errors="replace")
    addresses = dict(re.findall(r"^address_(\d+)=(\S+)", text, re.MULTILINE))
    tool = next((t for t in _HCCN_TOOLS if (machine.root / t).exists()), None)
    findings = []
    for npu in machine.npus:
        name, address = f"HCCN {npu}", addresses.get(str(npu))
        if address is None:
            findings.append(Finding(name, Verdict.WRONG, f"{conf} has no address_{npu}"))
            continue
        if tool is None:
            findings.append(Finding(name, Verdict.NOTE, f"{address}; no hccn_tool to ask for it"))
            continue
        command = [str(machine.root / tool), "-i", str(npu), "-link", "-g"]
        is_up = "link status: UP" in machine.run(command)
        verdict = Verdict.OK if is_up else Verdict.WRONG
        findings.append(Finding(name, verdict, f"{address}, link {'up' if is_up else 'not up'}"))
    return findings


def _hccl(machine: Machine) -> list[Finding]:
    environment, findings = machine.environment, []
    text = environment.get("HCCL_BUFFSIZE")
    if text is None:
        note = f"not set: HCCL takes {DEFAULT_BUFFER_MIB} MiB"
        findings.append(Finding("HCCL_BUFFSIZE", Verdict.OK, note))
    elif not text.isdecimal() or int(text) < _MIN_BUFFER_MIB:
        wrong = f"{text} is not allowed: a number of MiB from {_MIN_BUFFER_MIB} on"
        findings.append(Finding("HCCL_BUFFSIZE", Verdict.WRONG, wrong))
    else:
        findings.append(Finding("HCCL_BUFFSIZE", Verdict.OK, f"{text} MiB"))
    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1":
        wrong = "is 1: graphs cannot be captured while every launch waits"
        findings.append(Finding("ASCEND_LAUNCH_BLOCKING", Verdict.WRONG, wrong))
    return findings


def _field(path: Path, key: str) -> str | None:
    """The value of key= in a file, whatever is around it."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{key}\s*=\s*\[?([^\]\s:]+:)?([^\]\s]+)", text, re.MULTILINE)
    return found[2] if found else None


def _release(version: str) -> list[str]:
    """2.13.0+cpu and 2.13.0.post1 are of 2.13.0."""
    return version.partition("+")[0].split(".")[:3]
