"""A Ray that does not start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.leftovers import make_ray_folder, remove_leftovers
from pdserve.processes import is_alive


@pytest.mark.parametrize(
    ("raylet_ends", "expected"),
    [
        ("gives_up", "Ray could not start: The current node timed out during startup."),
        ("waits", "Ray could not start: Ray has ended"),
    ],
)
def test_what_a_ray_left_that_did_not_start_is_ended(
    tmp_path: Path, raylet_ends: str, expected: str
) -> None:
    # NOTE: whoever starts Ray ends all that runs below it, which here would be other tests' Ray.
    result = subprocess.run(
        [sys.executable, "-m", "tests.pdserve.failed_ray_start", str(tmp_path), raylet_ends],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    left, reason = result.stdout.splitlines()
    assert reason == expected
    assert not is_alive(int(left))
    assert not (tmp_path / "ray_processes").exists()


def test_a_worker_that_ray_started_last_is_ended_though_nobody_noted_it(tmp_path: Path) -> None:
    folder = make_ray_folder(tmp_path)
    worker = ["sleep", "600"]
    with (
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)", f"--socket={folder}/raylet"]
        ) as named,
        subprocess.Popen([*worker]) as other,
    ):
        remove_leftovers(tmp_path)
        assert named.wait(5) == -signal.SIGKILL
        assert is_alive(other.pid)
        other.kill()
    assert not os.path.exists(folder)
