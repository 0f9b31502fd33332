"""Metrics of one proxy, and the last reported state of its workers, in Prometheus' text format."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from protos import worker_pb2

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)

_HISTOGRAM_TEXT = "Seen at the proxy, in seconds"
_ROLE_NAMES = {worker_pb2.ROLE_PREFILLER: "prefiller", worker_pb2.ROLE_DECODER: "decoder"}

_GAUGES: tuple[tuple[str, str, Callable[[worker_pb2.WorkerStats], float]], ...] = (
    ("vllm:num_requests_running", "Sequences running", lambda s: s.num_running),
    ("vllm:num_requests_waiting", "Sequences waiting", lambda s: s.num_waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Share of KV blocks held, 0..1",
        lambda s: s.num_held_blocks / s.num_blocks if s.num_blocks else 0.0,
    ),
    ("pdserve_kv_blocks_held", "KV blocks referenced by anything", lambda s: s.num_held_blocks),
    ("pdserve_kv_blocks_free", "KV blocks that can be allocated", lambda s: s.num_free_blocks),
    (
        "pdserve_kv_blocks_quarantined",
        "KV blocks a writer may still touch",
        lambda s: s.num_quarantined_blocks,
    ),
    ("pdserve_kv_blocks", "KV blocks in the pool", lambda s: s.num_blocks),
    (
        "pdserve_kv_block_bytes",
        "Bytes of a KV block over all layers of a rank",
        lambda s: s.kv_block_bytes,
    ),
    ("pdserve_leases", "Keys that the worker keeps", lambda s: s.num_leases),
    (
        "pdserve_pending_prompt_tokens",
        "Prompt tokens waiting to be computed",
        lambda s: s.num_pending_tokens,
    ),
    (
        "pdserve_expert_imbalance",
        "Tokens of the hottest expert-parallel rank over the mean; 0: not looked at",
        lambda s: s.expert_imbalance,
    ),
    ("pdserve_graphs", "Graphs that decode steps may be replayed from", lambda s: s.num_graphs),
    (
        "pdserve_graph_bytes",
        "Bytes of the host's memory that graphs take; 0: not known",
        lambda s: s.num_graph_bytes,
    ),
    (
        "pdserve_graph_capture_seconds",
        "What making the graphs took before the worker served",
        lambda s: s.graph_capture_s,
    ),
    (
        "pdserve_layer_sharding_saved_bytes",
        "Bytes of weights that the leading rank need not hold",
        lambda s: s.num_saved_bytes,
    ),
)

_COUNTERS: tuple[tuple[str, str, Callable[[worker_pb2.WorkerStats], float]], ...] = (
    ("pdserve_computed_tokens", "Tokens computed", lambda s: s.num_computed_tokens),
    ("vllm:prompt_tokens", "Prompt tokens", lambda s: s.num_prompt_tokens),
    ("vllm:generation_tokens", "Generated tokens", lambda s: s.num_generated_tokens),
    ("vllm:num_preemptions", "Preemptions", lambda s: s.num_preemptions),
    (
        "vllm:prefix_cache_queries",
        "Prefix cache queries (tokens)",
        lambda s: s.prefix_cache_queries,
    ),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache", lambda s: s.prefix_cache_hits),
    (
        "vllm:spec_decode_num_drafts",
        "Times that drafts of a request were computed",
        lambda s: s.num_draft_steps,
    ),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens", lambda s: s.num_draft_tokens),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens that were right",
        lambda s: s.num_accepted_tokens,
    ),
    ("pdserve_moved_experts", "Experts that changed their rank", lambda s: s.num_moved_experts),
    ("pdserve_stale_messages", "Messages for ended attempts", lambda s: s.num_stale_messages),
    ("pdserve_expired_leases", "Leases that ran out", lambda s: s.num_expired_leases),
    ("pdserve_steps", "Forward passes", lambda s: s.num_steps),
    ("pdserve_ahead_steps", "Steps launched while one ran", lambda s: s.num_ahead_steps),
    (
        "pdserve_discarded_tokens",
        "Tokens computed for a request that had ended",
        lambda s: s.num_discarded_tokens,
    ),
    ("pdserve_graph_replays", "Decode steps replayed from a graph", lambda s: s.num_graph_replays),
    (
        "pdserve_graph_recompiles",
        "Graphs compiled while serving; stays 0",
        lambda s: s.num_graph_recompiles,
    ),
)

_BY_REASON: tuple[tuple[str, str, Callable[[worker_pb2.WorkerStats], Mapping[str, int]]], ...] = (
    ("pdserve_worker_failures", "Failed attempts", lambda s: s.failures),
    ("pdserve_eager_steps", "Steps computed without a graph", lambda s: s.eager_steps),
    ("pdserve_waiting_steps", "Steps not launched ahead", lambda s: s.waiting_steps),
)

_COLLECTIVES: tuple[tuple[str, str, Callable[[worker_pb2.CollectiveCount], float]], ...] = (
    ("pdserve_collective_calls", "Collective calls of a rank", lambda c: c.num_calls),
    ("pdserve_collective_bytes", "Bytes that a rank sent in them", lambda c: c.num_bytes),
)

_POOL_GAUGES: tuple[tuple[str, str, Callable[[worker_pb2.PoolStats], float]], ...] = (
    ("pdserve_dp_requests_running", "Sequences running on a rank", lambda p: p.num_running),
    ("pdserve_dp_requests_waiting", "Sequences waiting on a rank", lambda p: p.num_waiting),
    ("pdserve_dp_kv_blocks_held", "KV blocks of a rank held", lambda p: p.num_held_blocks),
)

_POOL_COUNTERS: tuple[tuple[str, str, Callable[[worker_pb2.PoolStats], float]], ...] = (
    ("pdserve_dp_dummy_steps", "Steps in which a rank had nothing", lambda p: p.num_dummy_steps),
    ("pdserve_dp_preemptions", "Preemptions on a rank", lambda p: p.num_preemptions),
)

_TRANSFERS: tuple[tuple[str, str, Callable[[worker_pb2.TransferPeerStats], float]], ...] = (
    ("pdserve_kv_transfer_bytes", "KV bytes moved", lambda t: t.num_bytes),
    ("pdserve_kv_transfer_blocks", "KV blocks moved", lambda t: t.num_blocks),
    ("pdserve_kv_transfers", "KV transfers", lambda t: t.num_transfers),
    ("pdserve_kv_transfer_failures", "KV transfers that failed", lambda t: t.num_failures),
    ("pdserve_kv_transfer_busy_seconds", "Time with a transfer in flight", lambda t: t.busy_s),
)


@dataclass(frozen=True, slots=True)
class ProxyState:
    """What the proxy itself holds at the moment of a scrape."""

    num_in_flight: int
    """Requests admitted and not answered."""
    num_queued: int
    num_pending_release: int
    """Keys that ended and that a worker has not released."""
    num_stale_messages: int
    num_session_breaks: int
    num_workers: dict[str, int]
    """Connected workers by role name."""
    stats: Sequence[worker_pb2.WorkerStats]


class ProxyMetrics:
    """Counters and histograms that the request path writes."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.requests = Counter(
            "pdserve_requests", "Requests by result", ["api", "status"], registry=self.registry
        )
        self.cancelled = Counter(
            "pdserve_requests_cancelled", "Requests whose client went away", registry=self.registry
        )
        self.disconnects = Counter(
            "pdserve_disconnects", "Client disconnects by phase", ["phase"], registry=self.registry
        )
        self.retries = Counter(
            "pdserve_retries",
            "Attempts that ended without finishing",
            ["reason"],
            registry=self.registry,
        )
        self.migrations = Counter(
            "pdserve_migrations",
            "Streams moved after tokens were sent",
            ["result"],
            registry=self.registry,
        )
        self.decisions = Counter(
            "pdserve_disagg_decisions",
            "Where prompts are prefilled",
            ["path", "reason"],
            registry=self.registry,
        )
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", _TTFT_BUCKETS)
        self._tpot = self._histogram("vllm:request_time_per_output_token_seconds", _ITL_BUCKETS)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", _E2E_BUCKETS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", _TTFT_BUCKETS)
        self.ttft = self._ttft.labels(model, "proxy")
        self.itl = TokenHistogram("vllm:inter_token_latency_seconds", _ITL_BUCKETS, model)
        self.registry.register(self.itl)
        self.tpot = self._tpot.labels(model, "proxy")
        self.e2e = self._e2e.labels(model, "proxy")
        self.queue = self._queue.labels(model, "proxy")

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            name,
            _HISTOGRAM_TEXT,
            ["model_name", "role"],
            buckets=buckets,
            registry=self.registry,
        )

    def observe_state(self, read: Callable[[], ProxyState]) -> None:
        """Add the state that `read` returns to every later scrape."""
        self.registry.register(_StateCollector(read, self._model))

    def render(self) -> bytes:
        """Everything, in the text exposition format."""
        return generate_latest(self.registry)


class TokenHistogram(Collector):
    """A histogram for what happens at every token, written by one thread.

    The library's own takes locks for each of its counters, which shows at this rate.
    """

    def __init__(self, name: str, bounds: Sequence[float], model: str) -> None:
        self._name = name
        self._bounds = bounds
        self._labels = [model, "proxy"]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The histogram as of now."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        metric = HistogramMetricFamily(self._name, _HISTOGRAM_TEXT, labels=["model_name", "role"])
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        metric.add_metric(self._labels, buckets, sum_value=self._sum)
        yield metric


class _StateCollector(Collector):
    def __init__(self, read: Callable[[], ProxyState], model: str) -> None:
        self._read = read
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Metrics of the proxy and of each worker, as of now."""
        state = self._read()
        for name, text, value in (
            ("pdserve_proxy_inflight_requests", "Requests admitted", state.num_in_flight),
            ("pdserve_proxy_queued_requests", "Requests waiting", state.num_queued),
            (
                "pdserve_proxy_keys_pending_release",
                "Ended keys that a worker has not released",
                state.num_pending_release,
            ),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        stale = CounterMetricFamily("pdserve_proxy_stale_messages", "Worker messages dropped")
        stale.add_metric([], state.num_stale_messages)
        yield stale
        breaks = CounterMetricFamily("pdserve_proxy_session_breaks", "Worker sessions that broke")
        breaks.add_metric([], state.num_session_breaks)
        yield breaks
        connected = GaugeMetricFamily("pdserve_workers", "Connected workers", labels=["role"])
        for role, count in state.num_workers.items():
            connected.add_metric([role], count)
        yield connected
        yield from self._worker_metrics(state.stats)

    def _worker_metrics(self, all_stats: Sequence[worker_pb2.WorkerStats]) -> Iterator[Metric]:
        labels = ["role", "engine_id", "model_name"]
        for name, text, read in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=labels)
            for stats in all_stats:
                gauge.add_metric(self._labels(stats), read(stats))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=labels)
            for stats in all_stats:
                counter.add_metric(self._labels(stats), read(stats))
            yield counter
        for name, text, read_transfer in _TRANSFERS:
            moved = CounterMetricFamily(name, text, labels=[*labels, "peer", "transport"])
            for stats in all_stats:
                # A peer of several ranks is one peer here: label sets must not be repeated.
                sums: defaultdict[tuple[str, str], float] = defaultdict(float)
                for peer in stats.transfers:
                    sums[peer.peer_engine_id, peer.transport] += read_transfer(peer)
                for peer_labels, value in sums.items():
                    moved.add_metric([*self._labels(stats), *peer_labels], value)
            yield moved
        yield from self._rank_metrics(all_stats)
        for name, text, read_reasons in _BY_REASON:
            counter = CounterMetricFamily(name, text, labels=[*labels, "reason"])
            for stats in all_stats:
                for reason, count in read_reasons(stats).items():
                    counter.add_metric([*self._labels(stats), reason], count)
            yield counter

    def _rank_metrics(self, all_stats: Sequence[worker_pb2.WorkerStats]) -> Iterator[Metric]:
        """Of the ranks of one worker."""
        labels = ["role", "engine_id", "model_name"]
        for name, text, read in _COLLECTIVES:
            counter = CounterMetricFamily(name, text, labels=[*labels, "rank", "kind"])
            for stats in all_stats:
                for count in stats.collectives:
                    values = [*self._labels(stats), str(count.rank), count.kind]
                    counter.add_metric(values, read(count))
            yield counter
        busy = CounterMetricFamily(
            "pdserve_stage_busy_seconds",
            "Time that a rank of a pipeline has computed",
            labels=[*labels, "rank"],
        )
        for stats in all_stats:
            for rank, busy_s in enumerate(stats.rank_busy_s):
                busy.add_metric([*self._labels(stats), str(rank)], busy_s)
        yield busy
        for make, metrics in (
            (GaugeMetricFamily, _POOL_GAUGES),
            (CounterMetricFamily, _POOL_COUNTERS),
        ):
            for name, text, read_pool in metrics:
                family = make(name, text, labels=[*labels, "dp_rank"])
                for stats in all_stats:
                    for dp_rank, pool in enumerate(stats.pools):
                        family.add_metric([*self._labels(stats), str(dp_rank)], read_pool(pool))
                yield family

    def _labels(self, stats: worker_pb2.WorkerStats) -> list[str]:
        return [_ROLE_NAMES.get(stats.role, "unknown"), stats.engine_id, self._model]
