"""Which decoder an attempt goes to, and who computes its prompt."""

import asyncio
import random

from protos import worker_pb2
from protos.block_hash import block_salt
from proxy.config import ProxyConfig
from proxy.errors import DeadlineExceeded, Overloaded, Unavailable
from proxy.journey import Journey
from proxy.metrics import ProxyMetrics
from proxy.router import Router, WorkerSnapshot, choose, helps_out
from proxy.session import Identity
from proxy.workers import WorkerPool

_MAX_REMOTE_FAILURES = 2
_MAX_DECODER_FAILURES = 2
_BACKOFF_MIN_S = 0.05
_BACKOFF_MAX_S = 1.0


class Placement:
    """Asks the router with what a journey has met so far, and waits where that helps."""

    def __init__(
        self, config: ProxyConfig, pool: WorkerPool, router: Router, metrics: ProxyMetrics
    ) -> None:
        self._config = config
        self._pool = pool
        self._router = router
        self._metrics = metrics

    async def choose_decoder(self, journey: Journey) -> tuple[WorkerSnapshot, list[bytes]]:
        """Pick a decoder, waiting a little for one to appear or to have room.

        Raises: Unavailable: none appeared; Overloaded: all stayed full; DeadlineExceeded.
        """
        give_up_s = _now_s() + self._config.worker_wait_s
        while True:
            workers = self._pool.snapshots()
            by_identity = {worker.identity: worker for worker in workers}
            decoders = [w for w in workers if w.role == worker_pb2.ROLE_DECODER]
            if decoders:
                block_size = decoders[0].block_size
                token_ids = journey.token_ids()
                request = journey.request
                adapter = self._pool.adapters.key(request.adapter)
                salt = block_salt(decoders[0].kv_identity, adapter, request.cache_salt)
                hashes = self._router.hash_prompt(token_ids, block_size, salt)
                candidate = self._router.candidate(
                    journey.request.request_id,
                    len(token_ids),
                    hashes,
                    block_size,
                    journey.num_failures,
                )
                chosen = choose(
                    decoders,
                    worker_pb2.ROLE_DECODER,
                    candidate,
                    max_failures=_MAX_DECODER_FAILURES,
                    excluded=journey.overloaded,
                )
                if chosen is not None:
                    return by_identity[chosen], hashes
                if any(worker.identity in journey.overloaded for worker in decoders):
                    await self._back_off(journey)
                    give_up_s = _now_s() + self._config.worker_wait_s
                    continue
            now_s = _now_s()
            if now_s >= journey.request.deadline_s:
                raise DeadlineExceeded("the request ran out of time")
            if now_s >= give_up_s:
                raise Unavailable("no decoder can serve the request", retry_after_s=1.0)
            await self._pool.wait_for_change(min(give_up_s, journey.request.deadline_s) - now_s)

    def choose_prefiller(
        self,
        journey: Journey,
        num_tokens: int,
        num_uncached: int,
        hashes: list[bytes],
        decoder: WorkerSnapshot,
    ) -> Identity | None:
        """Pick a prefiller, or None to prefill on the decoder; count the decision."""
        prefiller: Identity | None = None
        now = {worker.identity: worker for worker in self._pool.snapshots()}
        workers = [
            worker
            for worker in now.values()
            if worker.role == worker_pb2.ROLE_PREFILLER and not worker.is_draining
        ]
        if num_uncached <= self._config.local_prefill_tokens:
            path, reason = "local", "short"
        elif not workers:
            path, reason = "local", "no_prefiller"
        elif not any(worker.can_hold(num_tokens) for worker in workers):
            path, reason = "local", "too_long"
        elif journey.num_remote_failures >= _MAX_REMOTE_FAILURES:
            path, reason = "local", "prefill_failed"
        else:
            candidate = self._router.candidate(
                journey.request.request_id,
                num_tokens,
                hashes,
                decoder.block_size,
                journey.num_failures,
            )
            prefiller = choose(
                workers,
                worker_pb2.ROLE_PREFILLER,
                candidate,
                max_failures=1,
                excluded=journey.overloaded,
            )
            path, reason = "remote", "long"
            if prefiller is None:
                path, reason = "local", "overloaded" if journey.overloaded else "prefill_failed"
            elif self._config.local_prefill_tokens and helps_out(
                now.get(decoder.identity, decoder), now[prefiller], num_uncached
            ):
                prefiller, path, reason = None, "local", "prefiller_busy"
        self._metrics.decisions.labels(path, reason).inc()
        return prefiller

    async def _back_off(self, journey: Journey) -> None:
        """Every candidate is overloaded: wait, then give all of them another chance."""
        now_s = _now_s()
        if journey.overloaded_since_s is None:
            journey.overloaded_since_s = now_s
        if now_s >= journey.request.deadline_s:
            raise DeadlineExceeded("the request ran out of time")
        if now_s - journey.overloaded_since_s >= self._config.queue_timeout_s:
            raise Overloaded(
                f"workers stayed overloaded for {self._config.queue_timeout_s:g} s",
                retry_after_s=1.0,
            )
        pause_s = min(_BACKOFF_MAX_S, _BACKOFF_MIN_S * 2**journey.num_backoffs)
        journey.num_backoffs += 1
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        journey.overloaded.clear()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
