"""What several rooms' tests share: one local Ray for the whole run."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"


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
