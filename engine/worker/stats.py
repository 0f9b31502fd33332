"""What a worker knows about its own loop, as one message."""

from collections.abc import Iterator, Sequence

from engine.worker.assembly import Engine
from kvtransfer.layout import KVLayout
from protos import worker_pb2


def build_stats(engine: Engine, num_pending: Sequence[int]) -> worker_pb2.WorkerStats:
    """The engine's state between two steps; num_pending: by data-parallel rank, the requests that
    wait outside its scheduler.
    """
    hello, counters = engine.hello, engine.counters
    tiers = [pool.tiers for pool in engine.pools]
    schedulers = [pool.scheduler for pool in engine.pools]
    blocks = [pool.blocks for pool in engine.pools]
    stats = worker_pb2.WorkerStats(
        engine_id=hello.engine_id,
        incarnation=hello.incarnation,
        role=hello.role,
        num_running=sum(s.num_running for s in schedulers),
        num_waiting=sum(s.num_waiting for s in schedulers) + sum(num_pending),
        num_blocks=sum(b.num_blocks for b in blocks),
        num_free_blocks=sum(b.num_free_blocks for b in blocks),
        num_held_blocks=sum(b.num_held_blocks for b in blocks),
        num_quarantined_blocks=sum(b.num_quarantined_blocks for b in blocks),
        num_computed_tokens=counters.num_computed_tokens,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        num_preemptions=sum(s.num_preemptions for s in schedulers),
        prefix_cache_queries=sum(b.prefix_cache_queries for b in blocks),
        prefix_cache_hits=sum(b.prefix_cache_hits for b in blocks),
        num_stale_messages=counters.num_stale_messages,
        num_expired_leases=counters.num_expired_leases,
        num_pending_tokens=sum(s.num_pending_tokens for s in schedulers),
        failures=dict(counters.failures),
        tiers=tiers[0].stats(),
        num_promoted_blocks=sum(t.num_promoted_blocks for t in tiers),
        num_graph_replays=counters.forward.num_replays,
        num_graph_recompiles=counters.forward.num_recompiles,
        num_graphs=counters.forward.num_graphs,
        num_graph_bytes=counters.forward.num_graph_bytes,
        graph_capture_s=counters.forward.capture_s,
        eager_steps=dict(counters.forward.eager),
        num_ahead_steps=counters.ahead.num_ahead,
        num_discarded_tokens=counters.ahead.num_discarded,
        waiting_steps=dict(counters.ahead.waits),
        num_draft_steps=counters.drafts.num_steps,
        num_draft_tokens=counters.drafts.num_drafts,
        num_accepted_tokens=counters.drafts.num_accepted,
        num_moved_experts=counters.balance.num_moved_experts,
        expert_imbalance=counters.balance.imbalance,
        num_saved_bytes=counters.num_saved_bytes,
        num_steps=engine.model.num_steps,
        kv_cache_dtype=hello.layout.dtype,
        kv_block_bytes=KVLayout.from_proto(hello.layout).block_bytes_all_layers,
    )
    if engine.leading is not None:
        stats.collectives.extend(engine.leading.ranks.collectives)
    if engine.pipeline is not None:
        stats.rank_busy_s.extend(engine.pipeline.busy_s)
    if len(engine.pools) > 1:
        stats.pools.extend(_pool_stats(engine, num_pending))
    return stats


def _pool_stats(engine: Engine, num_pending: Sequence[int]) -> Iterator[worker_pb2.PoolStats]:
    for pool, pending, num_dummy_steps in zip(
        engine.pools, num_pending, engine.model.num_dummy_steps, strict=True
    ):
        yield worker_pb2.PoolStats(
            num_running=pool.scheduler.num_running,
            num_waiting=pool.scheduler.num_waiting + pending,
            num_held_blocks=pool.blocks.num_held_blocks,
            num_dummy_steps=num_dummy_steps,
            num_preemptions=pool.scheduler.num_preemptions,
        )
