"""How many cores this process may keep busy: its affinity, and what a container's quota leaves.

    cgroup v2: cpu.max                "QUOTA PERIOD", QUOTA max where there is none
    cgroup v1: cpu.cfs_quota_us       -1 where there is none
               cpu.cfs_period_us

A group's ancestors bind it too. More threads than the quota has cores would be stopped, all at
once, for the rest of each period.

Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def usable_cores(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> int:
    """At least 1; a part of a core counts as one.

    membership: lists the groups of this process. mount: where their files are.
    """
    cores = len(os.sched_getaffinity(0))
    quota = min(map(_quota, _folders(membership, mount)), default=math.inf)
    return max(1, min(cores, math.ceil(quota))) if math.isfinite(quota) else cores


def _folders(membership: Path, mount: Path) -> Iterator[Path]:
    """Of the groups that may bound the time on cores, and of their ancestors."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            roots = [mount]
        elif "cpu" in controllers.split(","):
            roots = [mount / controllers, mount / "cpu"]
        else:
            continue
        for root in roots:
            # NOTE: a container may see its own group as the root, whatever the group is called.
            path = root / group.lstrip("/")
            yield from (folder for folder in (path, *path.parents) if folder.is_relative_to(root))


def _quota(folder: Path) -> float:
    """Cores; infinite where the group sets no bound."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
