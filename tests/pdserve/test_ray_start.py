"""A Ray that does not start."""

import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from pdserve import ray_runtime
from pdserve.errors import StartFailed
from pdserve.processes import is_alive

_PARENT = """
import subprocess, time
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""


def test_what_a_ray_left_that_did_not_start_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphans: list[int] = []

    def start(*arguments: object, **options: object) -> NoReturn:
        """As Ray does where few processes are allowed: ends its raylet alone, and gives up."""
        with subprocess.Popen(
            [sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True
        ) as raylet:
            assert raylet.stdout is not None
            orphans.append(int(raylet.stdout.readline()))
            deadline_s = time.monotonic() + 30
            note = tmp_path / "ray_processes"
            while not (note.exists() and str(orphans[0]) in note.read_text()):
                assert time.monotonic() < deadline_s, "nothing was noted"
                time.sleep(0.05)
            raylet.kill()
        assert is_alive(orphans[0])
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray_runtime, "Node", start)
    with (
        pytest.raises(StartFailed, match="Ray could not start: The current node timed out"),
        ray_runtime.local_ray(1, 80 << 20, tmp_path),
    ):
        pass
    assert not is_alive(orphans[0])
    assert not (tmp_path / "ray_processes").exists()
