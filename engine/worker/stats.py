"""What a worker counts about its own loop, as one message."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.block_manager import BlockManager
from engine.expert_balancer import BalanceStats
from engine.prefix_tiers import PrefixTiers
from engine.runner import ForwardStats
from engine.scheduler import Scheduler
from engine.speculation import DraftCounters
from protos import worker_pb2


@dataclass(slots=True)
class LoopCounters:
    """Totals since the start; written by the engine loop only."""

    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_stale_messages: int = 0
    num_expired_leases: int = 0
    drafts: DraftCounters = field(default_factory=DraftCounters)
    failures: Counter[str] = field(default_factory=Counter)
    forward: ForwardStats = field(default_factory=ForwardStats)
    """The runner's own."""
    balance: BalanceStats = field(default_factory=BalanceStats)
    """The model's own."""


def build_stats(
    hello: worker_pb2.WorkerHello,
    counters: LoopCounters,
    scheduler: Scheduler,
    blocks: BlockManager,
    *,
    num_leases: int,
    num_pending: int,
    transfers: Sequence[worker_pb2.TransferPeerStats],
    tiers: PrefixTiers,
) -> worker_pb2.WorkerStats:
    """The worker's state between two steps; `num_pending` requests wait outside the scheduler."""
    return worker_pb2.WorkerStats(
        engine_id=hello.engine_id,
        incarnation=hello.incarnation,
        role=hello.role,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting + num_pending,
        num_blocks=blocks.num_blocks,
        num_free_blocks=blocks.num_free_blocks,
        num_held_blocks=blocks.num_held_blocks,
        num_quarantined_blocks=blocks.num_quarantined_blocks,
        num_leases=num_leases,
        num_computed_tokens=counters.num_computed_tokens,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        num_preemptions=scheduler.num_preemptions,
        prefix_cache_queries=blocks.prefix_cache_queries,
        prefix_cache_hits=blocks.prefix_cache_hits,
        num_stale_messages=counters.num_stale_messages,
        num_expired_leases=counters.num_expired_leases,
        transfers=transfers,
        num_pending_tokens=scheduler.num_pending_tokens,
        failures=dict(counters.failures),
        tiers=tiers.stats(),
        num_promoted_blocks=tiers.num_promoted_blocks,
        num_graph_replays=counters.forward.num_replays,
        num_graph_recompiles=counters.forward.num_recompiles,
        eager_steps=dict(counters.forward.eager),
        num_draft_steps=counters.drafts.num_steps,
        num_draft_tokens=counters.drafts.num_drafts,
        num_accepted_tokens=counters.drafts.num_accepted,
        num_moved_experts=counters.balance.num_moved_experts,
        expert_imbalance=counters.balance.imbalance,
    )
