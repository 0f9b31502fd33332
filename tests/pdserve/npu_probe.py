"""A worker that tells what its process was like before anything could load torch_npu.

Run as a program: a Ray with two NPUs that are not there, and two such workers in it.
"""

import asyncio
import json
import os
import sys
import tempfile
from typing import Any

SEEN = {name: os.environ.get(name) for name in ("ASCEND_RT_VISIBLE_DEVICES", "HCCL_BUFFSIZE")}
LOADED = [name for name in ("torch", "torch_npu") if name in sys.modules]


class Probe:
    def info(self) -> dict[str, Any]:
        return {"seen": SEEN, "loaded": LOADED, "pid": os.getpid()}

    def stop(self) -> None:
        pass


def start(config_json: str) -> Probe:
    return Probe()


async def main(namespace: str) -> list[dict[str, Any]]:
    from engine.worker.config import WorkerConfig
    from kernels.ascend.environment import HCCLConfig
    from pdserve.actors import RayWorkers
    from pdserve.controller_config import RoleConfig

    config = WorkerConfig(
        engine_id="w",
        model_path="",
        model_name="m",
        ops_backend="npu",
        hccl=HCCLConfig(buffer_mib=512),
    ).to_json()
    role = RoleConfig(
        entry="tests.pdserve.npu_probe:start", worker_json=config, replicas=2, num_npus=1
    )
    workers = RayWorkers(namespace)
    made = [await workers.create(name, role, config) for name in ("one", "two")]
    infos = [await worker.info() for worker in made]
    for worker in made:
        await worker.kill()
    return infos


if __name__ == "__main__":
    from pdserve.ray_environment import ray_environment

    os.environ.update(ray_environment(is_local=False, token=""))
    import ray

    # NOTE: not pytest's tmp_path: Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="pdt", dir="/tmp") as folder:
        ray.init(
            address="local",
            num_cpus=1,
            resources={"NPU": 2},
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=100 << 20,
            namespace="probe",
            _temp_dir=folder,
        )
        try:
            print(json.dumps(asyncio.run(main("probe"))))
        finally:
            ray.shutdown()
