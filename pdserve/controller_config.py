"""What the controller is told at its start; everything survives JSON, since Ray carries it."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

Role = Literal["prefiller", "decoder"]
ROLES: tuple[Role, ...] = ("prefiller", "decoder")


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleConfig:
    """How the workers of one role are made."""

    entry: str
    """module:function that starts what a worker's process runs, such as prefiller.actor:start."""
    worker_json: str
    """WorkerConfig as JSON; engine_id and host are filled in per worker."""
    replicas: int
    """Workers wanted at first."""
    num_ranks: int = 1
    """Processes of each worker; Ray places them together."""
    num_cpus: float = 0
    """CPUs that Ray reserves for each rank. 0 where one machine has to take any number of them."""
    num_npus: int = 0
    """NPU resources that Ray reserves for each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerConfig:
    """Everything that a controller has to know; times are in seconds."""

    service: str
    """Prefix of the names of all actors."""
    host: str = "127.0.0.1"
    """Address of the Controller service."""
    port: int
    """Port of the Controller service; the same over restarts, so that proxies find it again."""
    token: str
    """Secret that every caller must send."""
    namespace: str
    """Ray namespace of the actors."""
    worker_host: str = "127.0.0.1"
    """Address that workers bind and publish; empty takes that of the node they are on."""
    desired_path: str
    """File that keeps the numbers asked for by `Scale` over a restart of the controller."""
    prefiller: RoleConfig
    """The prefill role."""
    decoder: RoleConfig
    """The decode role."""
    poll_s: float = 3.0
    """A ready worker is asked so often; a broken connection tells earlier."""
    starting_poll_s: float = 0.1
    """The same while it starts."""
    heartbeat_s: float = 5.0
    """Watchers get the membership at multiples of this on the host's clock, as workers' stats."""
    silence_s: float = 10.0
    """A ready worker that does not answer for so long gets no new work."""
    kill_after_s: float = 60.0
    """A ready worker that does not answer for so long is killed, and so started anew."""
    start_timeout_s: float = 600.0
    """A new worker that has never answered after so long is killed; waiting for Ray counts."""
    stable_s: float = 30.0
    """A worker that lived so long starts with a clean slate when it dies."""
    max_quick_deaths: int = 3
    """After so many deaths in a row, restarts are delayed."""
    backoff_min_s: float = 1.0
    """First delay before a failed worker is started anew; doubles."""
    backoff_max_s: float = 60.0
    """Longest such delay."""
    drain_grace_s: float = 30.0
    """For the requests of a worker that has to go, unless `Scale` says otherwise."""
    drain_settle_s: float = 1.0
    """Shortest drain: proxies need that to hear of it."""
    stop_timeout_s: float = 5.0
    """For a worker to stop when asked; then it is killed."""

    def role(self, role: Role) -> RoleConfig:
        """How workers of a role are made."""
        return self.prefiller if role == "prefiller" else self.decoder

    def to_json(self) -> str:
        """Serialise; `from_json` is the inverse."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "ControllerConfig":
        """Read what `to_json` wrote."""
        values = json.loads(text)
        roles = {role: RoleConfig(**values[role]) for role in ROLES}
        return cls(**(values | roles))
