"""The workers as Ray sees them: what runs in their process, and a typed view of its handle.

Nothing else of the controller knows Ray's API or its exceptions.
"""

import asyncio
import importlib
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util import get_node_ip_address, list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kernels.ascend.environment import worker_variables
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
        # NOTE: before torch is loaded, and torch_npu with it. Ray has set which NPUs are visible.
        os.environ.update(worker_variables(config, host, os.environ))
        # NOTE: OpenMP reads this when torch is loaded, below. Its waiting threads must sleep: they
        # would spin for ever, beside the kernels' own, which spin for a moment.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        module, _, name = entry.partition(":")
        start = vars(importlib.import_module(module))[name]
        self._worker: Worker
        if (group := get_current_placement_group()) is None:
            self._worker = start(json.dumps(config))
        else:
            self._worker = start(json.dumps(config), RayLauncher(group, config))

    def info(self, rest_s: float = 0.0) -> Info:
        """The worker's own report as of then, `rest_s` from now, and the node it is on.

        NOTE: Ray's main thread looks for signals 100 times a second while it waits for a call, and
        sleeps within one. So whoever wants to know something later had better ask now.
        """
        time.sleep(rest_s)
        return dict(self._worker.info()) | {"node": self._node}

    def stop(self) -> None:
        """End the worker; the process stays until it is killed."""
        self._worker.stop()


class RankActor:
    """Another rank of a worker, in a process of its own; made by the worker, and gone with it."""

    def run(
        self, rank: int, address: str, token: str, follower: str, worker: dict[str, Any]
    ) -> None:
        """Be that rank until its leader at `address` is done; the process ends then.

        follower: the module to run; worker: the leader's WorkerConfig, as plain values.
        """
        is_local = address.startswith("127.")
        host: str = "127.0.0.1" if is_local else get_node_ip_address()  # type: ignore[no-untyped-call]
        os.environ.update(worker_variables(worker, host, os.environ))
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        importlib.import_module(follower).be_follower(rank, address, token, host)


class RayLauncher:
    """Implements engine.worker.ranks.Launcher: rank r runs in bundle r of the worker's group."""

    def __init__(self, group: PlacementGroup, worker: dict[str, Any]) -> None:
        """worker: its WorkerConfig, as plain values."""
        self._group = group
        # NOTE: ranks get their configuration, with its secrets, from the leader; these few values
        # they need before they load what could receive it.
        self._worker = {name: worker[name] for name in ("ops_backend", "hccl")}
        self._actors: list[ActorHandle[RankActor]] = []

    def launch(self, rank: int, address: str, token: str, follower: str) -> None:
        """Start the rank; Ray waits for its place if the one before has not left it yet."""
        bundle = self._group.bundle_specs[rank]
        options: dict[str, Any] = {
            "num_cpus": bundle.get("CPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, rank),
        }
        if "NPU" in bundle:
            options["resources"] = {"NPU": bundle["NPU"]}
        actor: Any = ray.remote(RankActor).options(**options).remote()
        actor.run.remote(rank, address, token, follower, self._worker)
        self._actors.append(actor)

    def close(self) -> None:
        """The ranks end by themselves; whoever does not is ended with its place."""
        self.kill()

    def kill(self) -> None:
        """End them now."""
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor, no_restart=True)
        self._actors.clear()


@dataclass(frozen=True, slots=True)
class RayWorker:
    """Handle of a WorkerActor."""

    handle: "ActorHandle[WorkerActor]"
    group: PlacementGroup | None = None
    """Where its ranks run, if there are several."""

    async def info(self, rest_s: float = 0.0) -> Info:
        """Ask for its state `rest_s` from now; waits while its constructor runs.

        Other calls wait for this one.

        Raises: ActorLost: the process died, Ray restarts it. ActorDead: gone for good.
        """
        try:
            info: Info = await self.handle.info.remote(rest_s)
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
        if self.group is not None:
            await asyncio.to_thread(remove_placement_group, self.group)


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
        group = None
        if role.num_ranks > 1:
            group = await asyncio.to_thread(_place, name, role)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, 0)
        factory = ray.remote(WorkerActor).options(**options)
        handle = await asyncio.to_thread(factory.remote, role.entry, config_json)
        return RayWorker(cast("ActorHandle[WorkerActor]", handle), group)

    async def names(self) -> list[str]:
        """Names of all live actors of the namespace."""
        actors = await asyncio.to_thread(list_named_actors, all_namespaces=True)
        return [actor["name"] for actor in actors if actor["namespace"] == self.namespace]


def _place(name: str, role: RoleConfig) -> PlacementGroup:
    """Room for the ranks of one worker, as near to each other as there is; kept over restarts."""
    group_name = f"{name}-ranks"
    try:
        group: PlacementGroup = get_placement_group(group_name)
        return group
    except ValueError:
        pass  # there is none yet
    bundle: dict[str, float] = {"CPU": role.num_cpus, "NPU": role.num_npus}
    bundle = {resource: amount for resource, amount in bundle.items() if amount}
    # NOTE: Ray refuses an empty bundle; a byte of memory is free everywhere.
    bundles = [bundle or {"memory": 1.0} for _ in range(role.num_ranks)]
    group = placement_group(bundles, strategy="PACK", name=group_name, lifetime="detached")
    return group


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A constructor's exception comes last; a death's cause comes first.
    return lines[-1] if len(lines) > 1 and isinstance(error, RayActorError) else lines[0]
