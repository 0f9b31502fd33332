"""A Ray that does not start."""

import subprocess
import sys
from pathlib import Path

from pdserve.processes import is_alive


def test_what_a_ray_left_that_did_not_start_is_ended(tmp_path: Path) -> None:
    # NOTE: whoever starts Ray ends all that runs below it, which here would be other tests' Ray.
    result = subprocess.run(
        [sys.executable, "-m", "tests.pdserve.failed_ray_start", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    orphan, reason = result.stdout.splitlines()
    assert reason == "Ray could not start: The current node timed out during startup."
    assert not is_alive(int(orphan))
    assert not (tmp_path / "ray_processes").exists()
