"""From a worker's configuration to its engine: weights, KV cache, scheduler, runner, sampler."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine.adapters import Adapters
from engine.ahead import AheadSteps
from engine.block_manager import BlockManager
from engine.grammar import Grammars
from engine.kv_events import KVEventLog
from engine.mtp import DraftingModel, MTPDrafter
from engine.ngram import NgramDrafter
from engine.prefix_tiers import PrefixTiers
from engine.runner import EagerForward, Forward, GraphForward, MakeForward, Runner
from engine.scheduler import Scheduler, SchedulerConfig
from engine.speculation import Drafter, Verifier
from engine.tier_worker import TierJobs
from engine.weights.vocabulary import load_vocabulary
from engine.worker.config import WorkerConfig
from engine.worker.context_forward import ContextForward
from engine.worker.convert import layout_to_proto
from engine.worker.cores import CoreShares
from engine.worker.counters import LoopCounters
from engine.worker.leading_model import LeadingForward, followers_of
from engine.worker.lockstep import Lockstep, SingleStep, StepCounts, StepModel
from engine.worker.pipeline import PipelinedModel, PipelinedSteps
from engine.worker.process import Start
from engine.worker.rank_part import Leading, RankPart, build_parts
from engine.worker.ranks import FOLLOWER
from engine.worker.step import RankSampler, StepRunner
from engine.worker.tier_ranks import TierRanks, tier_worker
from kernels.cpu.cores import usable_cores
from kernels.ops import Ops
from kvtransfer.registration import KVMemory
from protos import worker_pb2


@dataclass(frozen=True, slots=True)
class Pool:
    """The requests and the blocks of one data-parallel rank."""

    blocks: BlockManager
    scheduler: Scheduler
    tiers: PrefixTiers


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts that a loop drives."""

    hello: worker_pb2.WorkerHello
    memory: KVMemory
    """Of the leader's own rank."""
    pools: Sequence[Pool]
    """By data-parallel rank; the first is the leader's own."""
    model: StepCounts
    pipeline: PipelinedSteps | None
    """What a prefiller computes with whose layers are in several stages; None: `steps`."""
    steps: StepRunner
    counters: LoopCounters
    cores: CoreShares | None
    grammars: Grammars
    kv_events: KVEventLog
    leading: Leading | None
    """None: there is one rank."""
    adapters: Adapters | None
    """None: this split of the model takes none."""

    def close(self) -> None:
        """End the other ranks; give back the cache's memory and the share of cores."""
        if self.steps.ahead is not None:
            self.steps.ahead.close()
        if self.leading is not None:
            self.leading.ranks.close()
        for pool in self.pools:
            pool.tiers.close()
        self.memory.close()
        self.grammars.close()
        if self.cores is not None:
            self.cores.close()


def build_engine(
    start: Start,
    role: worker_pb2.Role.ValueType,
    transport: str,
    make_forward: MakeForward | None = None,
    follower: str = FOLLOWER,
) -> Engine:
    """Load the model and allocate the cache, reporting progress; `make_forward` None: eager.

    follower: the module that other ranks run, which makes the same of its part of the model.

    Raises: ValueError: the model or a limit does not fit; says which. OSError: unreadable files.
    """
    config = start.config
    _check_ranks(config, role)
    part, leading = build_parts(start, role, follower)
    model_config, memory, num_blocks = part.model_config, part.memory, part.num_blocks
    own_tiers = tier_worker(config, memory, role)
    kv_events = KVEventLog()
    max_model_len = part.max_model_len(config)
    eos_token_ids = model_config.eos_token_ids
    scheduler_config = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_tokens=config.max_prefill_tokens,
        max_num_waiting=config.max_num_waiting,
        max_model_len=max_model_len,
        num_draft_tokens=config.num_draft_tokens,
        prefill_only=role == worker_pb2.ROLE_PREFILLER,
    )

    def pool(dp_rank: int) -> Pool:
        tiers = PrefixTiers(
            _tier_jobs(config, dp_rank, own_tiers, leading),
            max_pinned_blocks=config.tiers.max_pinned_blocks,
            num_blocks=num_blocks,
            dp_rank=dp_rank,
        )
        blocks = BlockManager(num_blocks, config.block_size, [tiers, kv_events])
        return Pool(blocks, Scheduler(scheduler_config, blocks, eos_token_ids=eos_token_ids), tiers)

    pools = [pool(dp_rank) for dp_rank in range(config.parallel.dp_size)]
    adapters = None
    if part.adapters is not None:
        adapters = Adapters(part.adapters, None if leading is None else leading.model)
    step_model: StepModel | None = None
    pipelined = _pipelined(config, part, leading)
    if pipelined is None:
        step_model = _step_model(config, part, leading, make_forward, adapters)
    counted = pipelined or step_model
    assert counted is not None, "one of them computes"
    sharded = part.model.sharded_bytes()
    counters = LoopCounters(
        forward=counted.forward_stats,
        balance=part.model.balance_stats,
        num_saved_bytes=sharded.whole - sharded.held,
    )
    hello = worker_pb2.WorkerHello(
        engine_id=config.engine_id,
        incarnation=start.incarnation,
        role=role,
        model=config.model_name,
        layout=layout_to_proto(memory.layout),
        num_blocks=num_blocks * len(pools),
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        transport=transport,
    )
    cores = _join_cores(config)
    grammars = Grammars(
        partial(load_vocabulary, Path(config.model_path)), model_config.vocab_size, eos_token_ids
    )

    def sampler(scheduler: Scheduler) -> RankSampler:
        vocab_size, masks = model_config.vocab_size, grammars.next_masks
        verifier = Verifier(scheduler, vocab_size, eos_token_ids, part.ops, masks)
        model = part.model if leading is None else leading.model
        return RankSampler(verifier, _drafter(config, model, scheduler, memory))

    samplers = [sampler(pool.scheduler) for pool in pools]
    ahead, reason = None, ""
    if role == worker_pb2.ROLE_DECODER:
        reason = why_in_turn(config, part.ops)
        if not reason:
            assert isinstance(step_model, SingleStep), "there is one rank"
            queue = part.ops.queue()
            ahead = AheadSteps(step_model.runner, pools[0].scheduler, queue, counters.ahead)
    steps = StepRunner(step_model, part.ops, samplers, grammars, counters, cores, ahead, reason)
    return Engine(
        hello=hello,
        memory=memory,
        pools=pools,
        model=counted,
        pipeline=(
            None if pipelined is None else PipelinedSteps(pipelined, steps, pools[0].scheduler)
        ),
        steps=steps,
        counters=counters,
        cores=cores,
        grammars=grammars,
        kv_events=kv_events,
        leading=leading,
        adapters=adapters,
    )


def _step_model(
    config: WorkerConfig,
    part: RankPart,
    leading: Leading | None,
    make_forward: MakeForward | None,
    adapters: Adapters | None,
) -> StepModel:
    caches, block_size = part.memory.paged, config.block_size
    own: GraphForward = EagerForward(part.model)
    if make_forward is not None:
        own = make_forward(part.model, part.ops, part.forward_memory(config))
    if leading is None:
        return SingleStep(Runner(part.model, *caches, part.ops, block_size, own, adapters))
    if config.parallel.dp_size > 1:
        return Lockstep(leading.model, own, *caches, part.ops, block_size)
    forward: Forward = LeadingForward(leading.model, own)
    if config.parallel.cp_size > 1:
        forward = ContextForward(leading.model)
    return SingleStep(Runner(leading.model, *caches, part.ops, block_size, forward, adapters))


def _tier_jobs(
    config: WorkerConfig, dp_rank: int, own: TierJobs, leading: Leading | None
) -> TierJobs:
    """Of a data-parallel rank; own: the leader's rank's, which is in the first."""
    if leading is None:
        return own
    return TierRanks(
        own if dp_rank == 0 else None,
        leading.ranks,
        followers_of(config.parallel, dp_rank),
        is_on=config.tiers.is_on,
    )


def why_in_turn(config: WorkerConfig, ops: Ops) -> str:
    """Why no step of this worker runs ahead; empty: they may.

    Ranks get a step's tokens from the leader's host, and drafts are made from tokens there.
    """
    if config.async_scheduling == "off":
        return "async_scheduling is off"
    if config.parallel.world_size > 1:
        return "several ranks"
    if config.speculation != "none":
        return "speculation"
    if config.async_scheduling == "auto" and not ops.runs_ahead:
        return "async_scheduling is auto, on a CPU"
    return ""


def _pipelined(
    config: WorkerConfig, part: RankPart, leading: Leading | None
) -> PipelinedModel | None:
    if leading is None or leading.model.parallel.link is None:
        return None
    return PipelinedModel(
        leading.model,
        leading.model.parallel.link,
        leading.ranks,
        *part.memory.paged,
        part.ops,
        config.block_size,
    )


def _check_ranks(config: WorkerConfig, role: worker_pb2.Role.ValueType) -> None:
    if config.parallel.world_size == 1:
        return
    if config.parallel.pp_size > 1 and role != worker_pb2.ROLE_PREFILLER:
        raise ValueError(f"pp is {config.parallel.pp_size}: only prefillers have stages")
    if problems := config.parallel.pipeline_problems(
        has_tiers=config.tiers.is_on, speculation=config.speculation
    ):
        raise ValueError("; ".join(problems))
    if config.parallel.cp_size > 1:
        _check_context_parallel(config, role)
    if config.speculation == "mtp" and config.parallel.dp_size > 1:
        raise ValueError("speculation mtp does not go with dp: use ngram or none")


def _check_context_parallel(config: WorkerConfig, role: worker_pb2.Role.ValueType) -> None:
    cp = f"cp is {config.parallel.cp_size}"
    if role != worker_pb2.ROLE_PREFILLER:
        raise ValueError(f"{cp}: it is for prefillers")
    if config.speculation == "mtp":
        raise ValueError(f"{cp} and speculation mtp: use ngram or none")


def _drafter(
    config: WorkerConfig, model: DraftingModel, scheduler: Scheduler, memory: KVMemory
) -> Drafter | None:
    if config.speculation == "mtp":
        return MTPDrafter(model, scheduler, *memory.paged, config.block_size)
    return NgramDrafter(scheduler) if config.speculation == "ngram" else None


def _join_cores(config: WorkerConfig) -> CoreShares | None:
    if not config.cores_folder:
        return None
    folder = Path(config.cores_folder).expanduser()
    max_threads = config.max_threads or usable_cores()
    return CoreShares(folder, config.engine_id, config.num_threads, max_threads)
