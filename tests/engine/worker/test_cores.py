import ctypes
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.worker.cores import CoreShares


def lent_now(shares: CoreShares) -> int:
    """Threads that the others lend at this moment."""
    flags = shares.lent_flags()
    return sum(ctypes.c_int32.from_address(address).value == 0 for address in flags)


def test_an_idle_workers_cores_are_lent_and_come_back(tmp_path: Path) -> None:
    prefiller = CoreShares(tmp_path, "prefiller-0", own_threads=1, max_threads=4)
    decoder = CoreShares(tmp_path, "decoder-0", own_threads=2, max_threads=4)
    prefiller.set_busy(True)
    assert lent_now(prefiller) == 2
    decoder.set_busy(True)
    assert lent_now(prefiller) == 0
    assert lent_now(decoder) == 0
    prefiller.set_busy(False)
    assert lent_now(decoder) == 1
    prefiller.close()
    decoder.close()


def test_the_bound_of_a_step_holds(tmp_path: Path) -> None:
    shares = [CoreShares(tmp_path, f"w-{i}", own_threads=2, max_threads=4) for i in range(4)]
    assert lent_now(shares[0]) == 2
    for share in shares:
        share.close()


def test_a_folder_that_is_removed_costs_the_borrowed_cores_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.worker.cores._RESCAN_S", 0.0)
    shares = [CoreShares(tmp_path, f"w-{i}", own_threads=1, max_threads=4) for i in range(2)]
    assert lent_now(shares[0]) == 1
    shutil.rmtree(tmp_path)
    assert lent_now(shares[0]) == 0
    for share in shares:
        share.close()


def test_a_killed_worker_gives_its_cores_up(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from engine.worker.cores import CoreShares\n"
        "shares = CoreShares(pathlib.Path(sys.argv[1]), 'w-1', 1, 2)\n"
        "shares.set_busy(True)\n"
        "print('busy', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "busy\n"
        mine = CoreShares(tmp_path, "w-0", own_threads=1, max_threads=2)
        assert lent_now(mine) == 0
        other.kill()
        other.wait(10)
        deadline_s = time.monotonic() + 10.0
        while lent_now(mine) == 0 and time.monotonic() < deadline_s:
            time.sleep(0.05)  # it looks at who is there once a second
        assert lent_now(mine) == 1
        mine.close()
