"""Cores that a process may keep busy, by the files of its control groups."""

import os
from pathlib import Path

import pytest

from kernels.cpu.cores import usable_cores


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {}, 16),
        ("0::/", {"cpu.max": "max 100000\n"}, 16),
        ("0::/", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/", {"cpu.max": "1000 100000\n"}, 1),
        ("0::/", {"cpu.max": "9900000 100000\n"}, 16),
        ("0::/", {"cpu.max": "rubbish\n"}, 16),
        ("0::/a/b", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/not/seen/here", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/../other", {"cpu.max": "200000 100000\n"}, 2),
        (
            "3:memory:/x\n2:cpu,cpuacct:/docker/1",
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/cpu.cfs_period_us": "50000\n",
            },
            5,
        ),
        (
            "2:cpu:/docker/1",
            {
                "cpu/docker/1/cpu.cfs_quota_us": "-1\n",
                "cpu/docker/1/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
        ("2:cpuset:/x", {"cpuset/x/cpu.max": "100000 100000\n"}, 16),
    ],
)
def test_a_quota_bounds_the_cores(
    membership: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text(membership + "\n")
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cores(tmp_path / "membership", tmp_path / "mount") == expected


def test_without_control_groups_all_cores_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path) == 16


def test_of_this_machine_there_is_one() -> None:
    assert 1 <= usable_cores() <= 16
