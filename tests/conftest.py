"""What several rooms' tests share: one local Ray, and which tests may run side by side."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from hypothesis import HealthCheck, settings

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

# Examples that a busy machine is slow to make are no failure.
settings.register_profile("pdserve", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pdserve")

ROOT = Path(__file__).parent
FIRST = ("pdserve", "integration")
"""Rooms whose tests mostly wait for processes; begun first, they leave no long tail."""

SHARED = ("ranks", "packaged_service")
"""Fixtures of a whole session that take seconds to set up."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several pytest workers each file's tests stay together, as do all that start a Ray, and
    all that share one set of ranks or one service.
    """
    for item in items:
        file = item.path.relative_to(ROOT)
        room = file.parts[0]
        fixtures = item.fixturenames if isinstance(item, pytest.Function) else ()
        shared = [name for name in SHARED if name in fixtures]
        group = room if room == "pdserve" else str(file)
        item.add_marker(pytest.mark.xdist_group((shared or [group])[0]))
    order = {room: i for i, room in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.relative_to(ROOT).parts[0], len(FIRST)))


@pytest.fixture(scope="session")
def local_ray() -> Iterator[str]:
    """A Ray of our own; gives the namespace to use."""
    # NOTE: not pytest's tmp_path: Ray's sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="pdt", dir="/tmp"))
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=100 << 20,
        namespace="pdserve-test",
        _temp_dir=str(folder),
    )
    try:
        yield "pdserve-test"
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
