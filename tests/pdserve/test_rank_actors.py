"""A worker of several ranks on a real Ray: it is placed, restarted and ended as a whole."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.util.placement_group import placement_group_table

from engine.parallel_config import ParallelConfig
from engine.worker.config import WorkerConfig
from pdserve.actors import ActorLost, Info, RayWorker, RayWorkers
from pdserve.controller_config import RoleConfig
from tests.integration.conftest import write_tiny_model

pytestmark = pytest.mark.multiprocess

_TIMEOUT_S = 60.0


async def _info(worker: RayWorker, until: Callable[[Info], bool]) -> Info:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        assert time.monotonic() < deadline_s, "the worker is not what it should be"
        try:
            info = await worker.info()
        except ActorLost:
            continue
        assert info["state"] != "failed", info
        if until(info):
            return info
        await asyncio.sleep(0.1)


def _is_ready(info: Info) -> bool:
    return bool(info["state"] == "ready")


def _ranks() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "RankActor" in p.name()]


def _groups(name: str) -> list[dict[str, Any]]:
    groups = placement_group_table().values()
    return [g for g in groups if g["name"] == f"{name}-ranks" and g["state"] != "REMOVED"]


async def test_ray_places_restarts_and_ends_the_ranks_of_a_worker_together(
    local_ray: str, tmp_path: Path
) -> None:
    config = WorkerConfig(
        engine_id="decoder-0",
        model_path=str(write_tiny_model(tmp_path)),
        model_name="m",
        parallel=ParallelConfig(dp_size=2),
        num_blocks=8,
    )
    role = RoleConfig(
        entry="decoder.actor:start", worker_json=config.to_json(), replicas=1, num_ranks=2
    )
    worker = await RayWorkers(local_ray).create("ranked", role, config.to_json())
    try:
        first = await _info(worker, _is_ready)
        (group,) = _groups("ranked")
        assert len(group["bundles"]) == 2
        (rank,) = _ranks()
        os.kill(rank.pid, signal.SIGKILL)
        second = await _info(
            worker, lambda info: _is_ready(info) and info["incarnation"] != first["incarnation"]
        )
        assert second["pid"] != first["pid"]
        (rank,) = _ranks()
    finally:
        await worker.kill()
    rank.wait(10)
    assert _groups("ranked") == []
