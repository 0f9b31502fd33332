"""The groups that one rank of an engine computes in, and which part of a layer is its own.

Everything is passed down as an argument. A `Parallel` of one rank has groups that do nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from engine.collectives import CollectiveCounters, Group, ProcessGroup, SingleGroup, Tape
from engine.parallel_config import ParallelConfig
from engine.side_thread import SideThread
from engine.stage_link import StageLink
from engine.step_plan import StepPlan
from engine.turns import Turns
from kernels.experts import ExchangeGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """One rank's configuration and groups."""

    config: ParallelConfig = field(default_factory=ParallelConfig)
    tp: Group = field(default_factory=SingleGroup)
    dp: Group = field(default_factory=SingleGroup)
    """Ranks of the same tp_rank with other requests."""
    cp: Group = field(default_factory=SingleGroup)
    """Ranks of the same tp_rank with other rows of the same requests."""
    ep: Group = field(default_factory=SingleGroup)
    world: Group = field(default_factory=SingleGroup)
    link: StageLink | None = None
    """To the ranks of the same place in the other stages; None: there is one stage."""
    fused_tp: ExchangeGroup | None = None
    """The ranks of `tp`, for operators of the device that communicate themselves; None: it has
    none.
    """
    exchange: ExchangeGroup | None = None
    """The ranks of `ep` once more, for operators of the device alone; None: it has none."""
    exchange_rows: int = 0
    """Most rows that a rank hands to these in one call, the same on all ranks; 0: they are not
    used. See `WorkerConfig.exchange_rows`.
    """
    copies: ProcessGroup | None = None
    """As dp or cp, for weights on their way; None without layer sharding, or where it has one
    rank.
    """
    everyone: ProcessGroup | None = None
    """As world, for the same."""
    counters: CollectiveCounters = field(default_factory=CollectiveCounters)
    side: SideThread | None = None
    """For shared experts beside dispatch and combine; None: they come after."""
    turns: Turns | None = None
    """For the two halves of a step; None: all steps are computed as one."""
    step: StepPlan = field(default_factory=StepPlan)
    """Of the forward pass under way."""
    start: Group = field(default_factory=SingleGroup)
    """As world, on the host, for ranks that wait for each other for as long as graphs compile."""
    tape: Tape = field(default_factory=Tape)
    """What the groups' operations are written down on while a graph is captured."""


_START_TIMEOUT = timedelta(hours=4)


def join(
    config: ParallelConfig, store: Store, *, backend: str = "gloo", timeout_s: float = 60.0
) -> Parallel:
    """Meet the other ranks at `store` and build the groups; once per process, see `leave`.

    A collective whose peers do not come within timeout_s raises RuntimeError.
    Raises: RuntimeError: not all ranks came in time.
    """
    if config.world_size == 1:
        return Parallel(config=config)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend, store=store, rank=config.rank, world_size=config.world_size, timeout=timeout
    )
    counters, tape = CollectiveCounters(), Tape()

    turns = Turns() if config.dual_batch_overlap else None

    def group(
        name: str, members: Iterable[tuple[int, ...]], turns: Turns | None = None
    ) -> ProcessGroup | None:
        """NOTE: every rank makes every group, in the same order, also those it is not in."""
        mine = None
        for ranks in sorted(set(members)):
            if len(ranks) == 1:
                continue
            made = dist.new_group(list(ranks), timeout=timeout, backend=backend)
            if config.rank in ranks:
                mine = ProcessGroup(name, made, counters, turns, tape)
        return mine

    has_device = "hccl" in backend
    world, tp, ep = range(config.world_size), config.tp_size, config.ep_size
    sharing_experts = [tuple(r for r in world if r // ep == i // ep) for i in world]
    stage = config.stage_size
    alike = [tuple(r for r in world if (r // stage, r % tp) == (i // stage, i % tp)) for i in world]
    stages = [tuple(r for r in world if r % stage == i % stage) for i in world]
    # NOTE: groups of their own. What goes on beside a step must not be mixed up with its calls.
    shards = bool(config.layer_sharding)
    layer_ranks = [tuple(r for r in world if r // tp == i // tp) for i in world]
    sharing_layers = group("tp", layer_ranks, turns)
    replicas = group("dp" if config.cp_size == 1 else "cp", alike, turns) or SingleGroup()
    link = None
    if config.pp_size > 1:
        forward, back = group("pp", stages), group("pp_back", stages)
        assert forward is not None, "this rank is in a stage"
        assert back is not None, "this rank is in a stage"
        link = StageLink(forward, back, config.max_steps_under_way)
    start = dist.new_group(list(world), timeout=_START_TIMEOUT, backend="gloo")
    return Parallel(
        config=config,
        tp=sharing_layers or SingleGroup(),
        # NOTE: what computes and communicates in one operator leaves nothing to overlap.
        fused_tp=sharing_layers if has_device and turns is None else None,
        dp=replicas if config.cp_size == 1 else SingleGroup(),
        cp=replicas if config.cp_size > 1 else SingleGroup(),
        ep=group("ep", sharing_experts, turns) or SingleGroup(),
        world=group("world", [tuple(world)], turns) or SingleGroup(),
        link=link,
        copies=group("copies", alike) if shards else None,
        everyone=group("everyone", [tuple(world)]) if shards else None,
        # HCCL connects a group when it is first used: where nobody uses it, it costs nothing.
        exchange=group("exchange", sharing_experts) if has_device else None,
        counters=counters,
        # Its calls are no part of a step, and not counted with those.
        start=ProcessGroup("start", start, CollectiveCounters()),
        tape=tape,
        side=SideThread(torch.get_num_threads()) if config.shared_experts_beside else None,
        turns=turns,
    )


def leave() -> None:
    """End the groups of this process; peers that wait for it fail at once."""
    if dist.is_initialized():
        dist.destroy_process_group()
