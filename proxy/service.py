"""The service behind both edges: who may run, with what, and what is left of it afterwards."""

import asyncio
import secrets
import time
from contextlib import AsyncExitStack
from typing import Any

from protos import worker_pb2
from proxy.adapters import Adapters
from proxy.admission import Admission
from proxy.auth import Account, Accounts
from proxy.config import ProxyConfig
from proxy.errors import ClientDisconnected, ProxyError
from proxy.generation import DeltaSink, Generator
from proxy.handoff import Handoff
from proxy.metrics import ProxyMetrics, ProxyState
from proxy.request import GenerationRequest, Progress
from proxy.request_builder import RequestBuilder
from proxy.router import Router
from proxy.session import WorkerSession
from proxy.tokenizer import Tokenizer
from proxy.workers import WorkerPool

_ROLE_NAMES = {worker_pb2.ROLE_PREFILLER: "prefiller", worker_pb2.ROLE_DECODER: "decoder"}


class Service:
    """Everything of one proxy except its listeners."""

    def __init__(self, config: ProxyConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.started_s = int(time.time())
        self._known_model_len = 0
        self.metrics = ProxyMetrics(config.served_model_names[0])
        self.adapters = Adapters(config)
        self.router = Router()
        self.pool = WorkerPool(
            config, f"proxy-{secrets.token_hex(4)}", self.adapters, self.router.index
        )
        self.admission = Admission(config)
        self.accounts = Accounts(config)
        self.builder = RequestBuilder(config, tokenizer, self.max_model_len, self.adapters)
        handoff = Handoff(config, self.pool, self.router, self.metrics)
        self._generator = Generator(handoff, tokenizer, self.metrics)
        self.metrics.observe_state(self.state)

    @property
    def is_ready(self) -> bool:
        """A decoder is enough: it can prefill too."""
        return self.pool.has_ready(worker_pb2.ROLE_DECODER)

    def max_model_len(self) -> int:
        """Context limit in tokens of prompt and output; the last known one without a decoder."""
        self._known_model_len = self.pool.max_model_len or self._known_model_len
        limits = (
            self.config.max_model_len,
            self._known_model_len or self.tokenizer.context_length,
        )
        return min((limit for limit in limits if limit), default=2048)

    async def run(
        self, request: GenerationRequest, progress: Progress, account: Account, sink: DeltaSink
    ) -> None:
        """Admit a request and run it; cancellation leaves nothing of it.

        Raises: Overloaded, RateLimited: not admitted; ProxyError: it cannot go on.
        """
        loop = asyncio.get_running_loop()
        arrival_s = loop.time()
        seed = request.sampling.seed
        if seed is None:
            seed = secrets.randbits(63)
        account.admit(request.num_prompt_tokens)
        async with AsyncExitStack() as stack:
            with account.refund_unless_done(request.num_prompt_tokens):
                await stack.enter_async_context(self.admission.admit(request.num_sequences))
            self.metrics.queue.observe(loop.time() - arrival_s)
            try:
                await self._generator.run(
                    request,
                    progress,
                    sink,
                    deadline_s=arrival_s + self.config.request_timeout_s,
                    seed=seed,
                )
            finally:
                account.charge(sink.usage.completion_tokens)
        self.metrics.e2e.observe(loop.time() - arrival_s)

    def count(self, api: str, progress: Progress, error: BaseException | None) -> None:
        """Count how a request ended."""
        if isinstance(error, ClientDisconnected | asyncio.CancelledError):
            self.metrics.cancelled.inc()
            self.metrics.disconnects.labels(progress.phase.value).inc()
            status = "499"
        elif isinstance(error, ProxyError):
            status = str(error.status)
        else:
            status = "200" if error is None else "500"
        self.metrics.requests.labels(api, status).inc()

    def state(self) -> ProxyState:
        """What this proxy holds now."""
        sessions = self._sessions()
        roles = [s.hello.role for s in sessions if s.hello is not None and s.is_usable]
        return ProxyState(
            num_in_flight=self.admission.num_admitted,
            num_queued=self.admission.num_queued,
            num_pending_release=sum(session.num_pending_release for session in sessions),
            num_stale_messages=self.pool.counters.num_stale_messages,
            num_session_breaks=self.pool.counters.num_breaks,
            num_workers={name: roles.count(role) for role, name in _ROLE_NAMES.items()},
            stats=[s.stats for s in sessions if s.stats is not None and s.is_usable],
        )

    def status(self) -> dict[str, Any]:
        """The state of proxy and workers as JSON, for administrators."""
        state = self.state()
        return {
            "ready": self.is_ready,
            "models": list(self.config.served_model_names),
            "max_model_len": self.max_model_len(),
            "controller_connected": self.pool.has_controller,
            "membership_generation": self.pool.generation,
            "num_inflight_requests": state.num_in_flight,
            "num_queued_requests": state.num_queued,
            "num_keys_pending_release": state.num_pending_release,
            "num_stale_messages": state.num_stale_messages,
            "num_session_breaks": state.num_session_breaks,
            "workers": [
                _worker_status(link.session, link.entry, is_draining=link.is_draining)
                for link in self.pool.links.values()
            ],
        }

    def _sessions(self) -> list[WorkerSession]:
        return [link.session for link in self.pool.links.values()]


def _worker_status(
    session: WorkerSession, entry: worker_pb2.WorkerEntry, *, is_draining: bool
) -> dict[str, Any]:
    stats = session.stats or worker_pb2.WorkerStats()
    return {
        "engine_id": entry.engine_id,
        "incarnation": entry.incarnation,
        "role": _ROLE_NAMES.get(entry.role, "unknown"),
        "address": entry.address,
        "pid": entry.pid,
        "connected": session.is_usable,
        "draining": is_draining,
        "num_active": session.num_active,
        "num_pending_release": session.num_pending_release,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "num_blocks": stats.num_blocks,
        "num_free_blocks": stats.num_free_blocks,
        "num_held_blocks": stats.num_held_blocks,
        "num_quarantined_blocks": stats.num_quarantined_blocks,
        "num_leases": stats.num_leases,
        "num_computed_tokens": stats.num_computed_tokens,
        "num_generated_tokens": stats.num_generated_tokens,
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_preemptions": stats.num_preemptions,
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
        "num_draft_steps": stats.num_draft_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_moved_experts": stats.num_moved_experts,
        "expert_imbalance": stats.expert_imbalance,
        "num_saved_bytes": stats.num_saved_bytes,
        "num_stale_messages": stats.num_stale_messages,
        "num_expired_leases": stats.num_expired_leases,
        "num_pending_tokens": stats.num_pending_tokens,
        "failures": dict(stats.failures),
        "num_graph_replays": stats.num_graph_replays,
        "num_graph_recompiles": stats.num_graph_recompiles,
        "num_graphs": stats.num_graphs,
        "num_graph_bytes": stats.num_graph_bytes,
        "graph_capture_s": stats.graph_capture_s,
        "eager_steps": dict(stats.eager_steps),
        "num_ahead_steps": stats.num_ahead_steps,
        "num_discarded_tokens": stats.num_discarded_tokens,
        "waiting_steps": dict(stats.waiting_steps),
        "num_steps": stats.num_steps,
        "data_parallel_ranks": [
            {
                "num_running": pool.num_running,
                "num_waiting": pool.num_waiting,
                "num_held_blocks": pool.num_held_blocks,
                "num_dummy_steps": pool.num_dummy_steps,
                "num_preemptions": pool.num_preemptions,
            }
            for pool in stats.pools
        ],
        "transfers": [
            {
                "peer": peer.peer_engine_id,
                "transport": peer.transport,
                "num_transfers": peer.num_transfers,
                "num_blocks": peer.num_blocks,
                "num_bytes": peer.num_bytes,
                "num_failures": peer.num_failures,
                "busy_s": peer.busy_s,
            }
            for peer in stats.transfers
        ],
    }
