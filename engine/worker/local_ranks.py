"""Followers as processes on the leader's machine, for an engine that nobody else places."""

import json
import subprocess
import sys

_STOP_TIMEOUT_S = 5.0


class LocalLauncher:
    """Starts `python -m <follower>`; each ends with its connection to the leader."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def launch(self, rank: int, address: str, token: str, follower: str) -> None:
        """See ranks.Launcher."""
        process = subprocess.Popen([sys.executable, "-m", follower], stdin=subprocess.PIPE)
        self._processes.append(process)
        assert process.stdin is not None
        # NOTE: not as an argument, which everybody on the machine can read.
        process.stdin.write(json.dumps([rank, address, token]).encode())
        process.stdin.close()

    def close(self) -> None:
        """See ranks.Launcher."""
        for process in self._processes:
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_TIMEOUT_S)
        self._processes.clear()

    def kill(self) -> None:
        """See ranks.Launcher."""
        for process in self._processes:
            process.kill()
