"""The workers as Ray sees them: what runs in their process, and a typed view of its handle.

Nothing else of the controller knows Ray's API or its exceptions.
"""

import asyncio
import importlib
import json
import os
from dataclasses import dataclass
from typing import Any, Protocol, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util import get_node_ip_address, list_named_actors

from pdserve.controller_config import RoleConfig

Info = dict[str, Any]
"""engine_id, incarnation, address, state, phase, progress, error, pid, node."""


class Worker(Protocol):
    """What runs in a worker's process."""

    def info(self) -> Info:
        """A snapshot of its state."""
        ...

    def stop(self) -> None:
        """End; returns when it is over."""
        ...


class ActorLost(Exception):
    """The process died; Ray starts it anew."""


class ActorDead(Exception):
    """The actor is gone for good; somebody has to create it anew."""


class WorkerActor:
    """Runs one role's worker in a process of its own.

    NOTE: it imports the role when it starts, by name: the controller, which has to create these
    actors, would otherwise load torch only to name them.
    """

    def __init__(self, entry: str, config_json: str) -> None:
        config = json.loads(config_json)
        self._node: str = get_node_ip_address()  # type: ignore[no-untyped-call]
        host = config["host"] or self._node
        config["host"] = host
        config["transfer"]["host"] = host
        # NOTE: OpenMP reads this when torch is loaded, below. Its waiting threads must sleep: they
        # would spin for ever, beside the kernels' own, which spin for a moment.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        module, _, name = entry.partition(":")
        start = vars(importlib.import_module(module))[name]
        self._worker: Worker = start(json.dumps(config))

    def info(self) -> Info:
        """The worker's own report, and the node it is on."""
        return dict(self._worker.info()) | {"node": self._node}

    def stop(self) -> None:
        """End the worker; the process stays until it is killed."""
        self._worker.stop()


@dataclass(frozen=True, slots=True)
class RayWorker:
    """Handle of a WorkerActor."""

    handle: "ActorHandle[WorkerActor]"

    async def info(self) -> Info:
        """Ask for its state; waits while its constructor runs.

        Raises: ActorLost: the process died, Ray restarts it. ActorDead: gone for good.
        """
        try:
            info: Info = await self.handle.info.remote()
        except ActorUnavailableError as error:
            raise ActorLost(_reason(error)) from None
        except RayActorError as error:
            raise ActorDead(_reason(error)) from None
        except RayError as error:
            raise ActorLost(_reason(error)) from None
        return info

    async def stop(self) -> None:
        """Ask it to stop and wait until it has; a dead one has."""
        try:
            await self.handle.stop.remote()
        except RayError:
            return

    async def kill(self) -> None:
        """End its process, for good; its name is free at once."""
        await asyncio.to_thread(ray.kill, self.handle, no_restart=True)


@dataclass(frozen=True, slots=True)
class RayWorkers:
    """Creates and finds workers by name in one namespace."""

    namespace: str

    async def create(self, name: str, role: RoleConfig, config_json: str) -> RayWorker:
        """The worker called `name`, made if there is none."""
        options: dict[str, Any] = {
            "name": name,
            "namespace": self.namespace,
            "get_if_exists": True,
            # NOTE: detached: they outlive a controller that crashes; its successor finds them.
            "lifetime": "detached",
            "max_restarts": -1,
            "max_task_retries": 0,
            "num_cpus": role.num_cpus,
        }
        if role.num_npus:
            options["resources"] = {"NPU": role.num_npus}
        factory = ray.remote(WorkerActor).options(**options)
        handle = await asyncio.to_thread(factory.remote, role.entry, config_json)
        return RayWorker(cast("ActorHandle[WorkerActor]", handle))

    async def names(self) -> list[str]:
        """Names of all live actors of the namespace."""
        actors = await asyncio.to_thread(list_named_actors, all_namespaces=True)
        return [actor["name"] for actor in actors if actor["namespace"] == self.namespace]


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A constructor's exception comes last; a death's cause comes first.
    return lines[-1] if len(lines) > 1 and isinstance(error, RayActorError) else lines[0]
