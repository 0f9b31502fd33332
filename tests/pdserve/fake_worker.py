"""A worker without a model: a real process with a real gRPC Worker service."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from protos import worker_pb2, worker_pb2_grpc


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """`model_path` is a folder of switches: `<engine_id>.fail`, `.crash` and `.leases` files."""

    def __init__(self, config_json: str) -> None:
        config = json.loads(config_json)
        self._engine_id: str = config["engine_id"]
        self._switches = Path(config["model_path"])
        if self._switch("crash").exists():
            os._exit(3)
        self._incarnation = time.time_ns() // 1000
        self._server = grpc.server(ThreadPoolExecutor(2))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(f"{config['host']}:0")
        self._server.start()
        self._address = f"{config['host']}:{port}"

    def info(self) -> dict[str, Any]:
        is_failed = self._switch("fail").exists()
        return {
            "engine_id": self._engine_id,
            "incarnation": self._incarnation,
            "address": self._address,
            "state": "failed" if is_failed else "ready",
            "phase": "serving",
            "progress": 1.0,
            "error": "no such weights" if is_failed else "",
            "pid": os.getpid(),
        }

    def stop(self) -> None:
        self._switch("stopped").touch()
        self._server.stop(0)

    def GetStats(
        self, request: worker_pb2.GetStatsRequest, context: grpc.ServicerContext
    ) -> worker_pb2.WorkerStats:
        leases = self._switch("leases")
        return worker_pb2.WorkerStats(
            engine_id=self._engine_id,
            num_leases=int(leases.read_text()) if leases.exists() else 0,
        )

    def _switch(self, name: str) -> Path:
        return self._switches / f"{self._engine_id}.{name}"
