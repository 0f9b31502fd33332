"""A start of Ray that fails, in a process of its own: what runs below it is ended.

    python -m tests.pdserve.failed_ray_start FOLDER gives_up | waits

Prints the id of a process that Ray left, or of its raylet, then why the start failed.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn
from unittest import mock

from pdserve import ray_runtime
from pdserve.errors import StartFailed
from pdserve.processes import is_alive

_PARENT = """
import subprocess, time
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
time.sleep(600)
"""


def main(folder: Path, raylet_ends: str) -> None:
    """Start Ray with a state folder there; gives_up, waits: what Ray does when its raylet ends."""

    def wait(*arguments: object, **options: object) -> NoReturn:
        """As Ray does when its raylet is killed: looks for it again and again.

        NOTE: a signal that comes just before a sleep does not cut it short.
        """
        program = folder / "raylet"
        shutil.copy("/bin/sleep", program)
        with subprocess.Popen([program, "600"]) as raylet:
            print(raylet.pid, flush=True)
            raylet.kill()
            deadline_s = time.monotonic() + 40
            while time.monotonic() < deadline_s:
                time.sleep(0.1)
        raise AssertionError("nothing ended the wait")

    def give_up(*arguments: object, **options: object) -> NoReturn:
        """As Ray does where few processes are allowed: ends its raylet alone, and gives up."""
        with subprocess.Popen(
            [sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True
        ) as raylet:
            assert raylet.stdout is not None
            orphan = int(raylet.stdout.readline())
            deadline_s = time.monotonic() + 30
            note = folder / "ray_processes"
            while not (note.exists() and str(orphan) in note.read_text()):
                assert time.monotonic() < deadline_s, "nothing was noted"
                time.sleep(0.05)
            raylet.kill()
        assert is_alive(orphan)
        print(orphan, flush=True)
        raise Exception("The current node timed out during startup.")

    with mock.patch.object(ray_runtime, "Node", give_up if raylet_ends == "gives_up" else wait):
        try:
            with ray_runtime.local_ray(1, 80 << 20, folder):
                pass
        except StartFailed as error:
            print(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
