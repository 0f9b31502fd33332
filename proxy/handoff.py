"""One sequence from its reservation to its last token, over as many attempts as it takes.

    attempt:  RESERVE at a decoder
              -> remote: PREFILL at a prefiller, first token, Activate, TRANSFER
              -> local:  PREFILL on the decoder
              -> DECODE -> finish
    failure:  another prefiller -> prefill on the decoder -> another decoder -> 503

A failure after tokens were emitted is a migration: the next attempt's prompt is prompt + emitted
tokens, and the sampler's random numbers depend only on (seed, position), so the text goes on
unchanged. Leaving an attempt, for whatever reason, cancels what its workers still hold.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from dataclasses import dataclass, field

from protos import worker_pb2
from protos.block_hash import block_salt
from proxy.config import ProxyConfig
from proxy.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from proxy.inbox import Inbox, WakeQueue
from proxy.metrics import ProxyMetrics
from proxy.request import FinishReason, Phase, Progress, SequenceRequest, TokenEvent
from proxy.router import Router, WorkerSnapshot, choose, helps_out
from proxy.session import Call, CallInbox, CallMessage, Identity, SessionLost
from proxy.token_output import logprobs_of, prompt_logprobs_of
from proxy.workers import WorkerPool

_MAX_REMOTE_FAILURES = 2
_MAX_DECODER_FAILURES = 2
_PROGRESS_TOKENS = 8
# More would make events, and what is buffered for a client that stops reading, large.
_MAX_JOINED_TOKENS = 32
_DEADLINE_SLACK_S = 1.0
_BACKOFF_MIN_S = 0.05
_BACKOFF_MAX_S = 1.0

_FINISH = {
    worker_pb2.FINISH_NONE: None,
    worker_pb2.FINISH_STOP: FinishReason.STOP,
    worker_pb2.FINISH_LENGTH: FinishReason.LENGTH,
}


class AttemptFailed(Exception):
    """An attempt ended without finishing; `blamed` is the worker to avoid next time, if any."""

    def __init__(self, reason: str, blamed: Identity | None, *, is_overload: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.blamed = blamed
        self.is_overload = is_overload


@dataclass(slots=True)
class _Journey:
    """What one sequence knows over its attempts."""

    request: SequenceRequest
    progress: Progress
    emitted: list[int] = field(default_factory=list)
    num_attempts: int = 0
    num_failed: int = 0
    num_remote_failures: int = 0
    num_emitted_before: int = 0
    """Tokens emitted when the current attempt started."""
    num_failures: Counter[Identity] = field(default_factory=Counter)
    overloaded: set[Identity] = field(default_factory=set)
    overloaded_since_s: float | None = None
    num_backoffs: int = 0
    is_migrating: bool = False
    decoder: Identity | None = None
    """Of the current attempt."""
    prefiller: Identity | None = None
    """Of the current attempt."""

    def token_ids(self) -> list[int]:
        """Prompt and emitted output."""
        return [*self.request.prompt_token_ids, *self.emitted]

    def work(self, now_s: float) -> worker_pb2.Work:
        """The message that lets a worker start, or go on, with this sequence."""
        return worker_pb2.Work(
            token_ids=self.token_ids(),
            num_prompt_tokens=len(self.request.prompt_token_ids),
            sampling=self.request.sampling,
            deadline_ms=max(1, int((self.request.deadline_s - now_s) * 1000)),
            priority=self.request.priority,
            cache_salt=self.request.cache_salt,
            adapter=self.request.adapter,
        )


class Handoff:
    """Runs sequences on the workers of a pool."""

    def __init__(
        self, config: ProxyConfig, pool: WorkerPool, router: Router, metrics: ProxyMetrics
    ) -> None:
        self._config = config
        self._pool = pool
        self._router = router
        self._metrics = metrics
        self._wakes = WakeQueue()

    async def run(
        self, request: SequenceRequest, progress: Progress
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield each output token exactly once, in order; close the iterator to cancel.

        Raises: InvalidRequest, Overloaded, Unavailable, DeadlineExceeded: before or after tokens.
        """
        journey = _Journey(request, progress)
        try:
            while True:
                try:
                    async with aclosing(self._attempt(journey)) as events:
                        async for event in events:
                            yield event
                    return
                except AttemptFailed as failure:
                    await self._recover(journey, failure)
        except (InvalidRequest, Overloaded, Unavailable, DeadlineExceeded):
            if journey.is_migrating:
                self._metrics.migrations.labels("failed").inc()
            raise

    async def _attempt(self, journey: _Journey) -> AsyncGenerator[TokenEvent, None]:
        journey.progress.phase = Phase.RESERVE
        decoder, hashes = await self._choose_decoder(journey)
        key = (journey.request.request_id, journey.num_attempts)
        journey.num_attempts += 1
        journey.num_emitted_before = len(journey.emitted)
        journey.decoder, journey.prefiller = decoder.identity, None
        inbox: CallInbox = Inbox(self._wakes)
        work = journey.work(_now_s())
        session = self._pool.session(decoder.identity)
        with closing(inbox), session.open(key, inbox) as reservation:
            reserve = worker_pb2.Reserve(key=reservation.proto_key(), work=work)
            reservation.send(worker_pb2.ProxyMessage(reserve=reserve))
            reserved = await self._await_reserved(journey, inbox)
            num_uncached = len(work.token_ids) - reserved.num_cached_tokens
            prefiller = self._choose_prefiller(
                journey, len(work.token_ids), num_uncached, hashes, decoder
            )
            journey.prefiller = prefiller
            journey.progress.phase = Phase.PREFILL
            if prefiller is None:
                session.expect(reservation, num_uncached)
                locally = worker_pb2.PrefillLocally(key=reservation.proto_key())
                reservation.send(worker_pb2.ProxyMessage(prefill_locally=locally))
                timeout_s = self._config.first_token_timeout_s
                async with aclosing(
                    self._decode(journey, inbox, reservation, None, timeout_s)
                ) as events:
                    async for event in events:
                        session.settle(reservation)
                        self._router.note(hashes, decoder.identity)
                        hashes = []
                        yield event
                return
            async with aclosing(
                self._disaggregated(
                    journey, inbox, reservation, work, reserved.target, prefiller, num_uncached
                )
            ) as events:
                async for event in events:
                    self._router.note(hashes, decoder.identity)
                    self._router.note(hashes, prefiller)
                    hashes = []
                    yield event

    async def _disaggregated(
        self,
        journey: _Journey,
        inbox: CallInbox,
        reservation: Call,
        work: worker_pb2.Work,
        target: worker_pb2.KVTarget,
        prefiller: Identity,
        num_uncached: int,
    ) -> AsyncGenerator[TokenEvent, None]:
        session = self._pool.session(prefiller)
        with session.open(reservation.key, inbox, pending_tokens=num_uncached) as prefill:
            message = worker_pb2.Prefill(key=prefill.proto_key(), work=work, target=target)
            prefill.send(worker_pb2.ProxyMessage(prefill=message))
            first = await self._await_first_token(journey, inbox, prefill)
            # NOTE: the first token goes out before Activate, so that a stop string found in it
            # ends the request without any decode work.
            yield first
            if first.finish_reason is not None:
                return
            journey.progress.phase = Phase.TRANSFER
            activate = worker_pb2.Activate(
                key=reservation.proto_key(),
                token_ids=first.token_ids,
                draft_token_ids=first.draft_token_ids,
            )
            reservation.send(worker_pb2.ProxyMessage(activate=activate))
            timeout_s = self._config.token_timeout_s
            async with aclosing(
                self._decode(journey, inbox, reservation, prefill, timeout_s)
            ) as events:
                async for event in events:
                    yield event

    async def _await_reserved(self, journey: _Journey, inbox: CallInbox) -> worker_pb2.Reserved:
        while True:
            call, message = await self._next(
                journey, inbox, self._config.reserve_timeout_s, waiting_for="reservation"
            )
            if isinstance(message, worker_pb2.Reserved):
                return message
            if isinstance(message, worker_pb2.Released):
                raise AttemptFailed("released early", call.session.identity)

    async def _await_first_token(
        self, journey: _Journey, inbox: CallInbox, prefill: Call
    ) -> TokenEvent:
        while True:
            call, message = await self._next(
                journey, inbox, self._config.first_token_timeout_s, waiting_for="prefill"
            )
            if isinstance(message, worker_pb2.Released):
                raise AttemptFailed("released early", call.session.identity)
            if call is prefill and isinstance(message, worker_pb2.TokenOutput):
                call.session.settle(call)
                event = self._accept(journey, call, message)
                if event is not None:
                    return event

    async def _decode(
        self,
        journey: _Journey,
        inbox: CallInbox,
        decode: Call,
        prefill: Call | None,
        timeout_s: float,
    ) -> AsyncGenerator[TokenEvent, None]:
        while True:
            call, message = await self._next(journey, inbox, timeout_s, waiting_for="token")
            if isinstance(message, worker_pb2.Released):
                if call is decode:
                    raise AttemptFailed("released early", call.session.identity)
                continue
            if call is not decode or not isinstance(message, worker_pb2.TokenOutput):
                continue
            if prefill is not None:
                # A decoded token proves that the KV arrived: the prefiller needs us no more.
                prefill.session.detach(prefill)
                prefill = None
            journey.progress.phase = Phase.DECODE
            timeout_s = self._config.token_timeout_s
            event = self._accept(journey, call, message)
            if event is None:
                continue
            while (
                event.finish_reason is None
                and len(event.token_ids) < _MAX_JOINED_TOKENS
                and (more := self._waiting(journey, inbox, call))
            ):
                event = event.joined(more)
            yield event
            if event.finish_reason is not None:
                return

    async def _next(
        self, journey: _Journey, inbox: CallInbox, timeout_s: float, *, waiting_for: str
    ) -> tuple[Call, CallMessage]:
        """Take the next message that is not a failure.

        Raises: AttemptFailed: on a failure, a lost session or a timeout of the workers;
            InvalidRequest: when a worker says that no retry can help; DeadlineExceeded.
        """
        deadline_s = journey.request.deadline_s
        try:
            call, message = await inbox.get(min(_now_s() + timeout_s, deadline_s))
        except TimeoutError:
            if _now_s() >= deadline_s:
                raise DeadlineExceeded("the request ran out of time") from None
            suspect = journey.prefiller if waiting_for == "prefill" else journey.decoder
            raise AttemptFailed(f"{waiting_for} timeout", suspect) from None
        if isinstance(message, SessionLost):
            raise AttemptFailed("worker lost", call.session.identity)
        if isinstance(message, worker_pb2.Failed):
            raise self._failure(journey, call, message)
        return call, message

    def _failure(self, journey: _Journey, call: Call, failed: worker_pb2.Failed) -> Exception:
        identity: Identity | None = call.session.identity
        if failed.code == worker_pb2.FAILURE_INVALID:
            return InvalidRequest(failed.message or "the worker refused the request")
        time_left_s = journey.request.deadline_s - _now_s()
        if failed.code == worker_pb2.FAILURE_DEADLINE and time_left_s < _DEADLINE_SLACK_S:
            return DeadlineExceeded("the request ran out of time")
        if failed.code == worker_pb2.FAILURE_OVERLOADED:
            return AttemptFailed("overloaded", identity, is_overload=True)
        if failed.code == worker_pb2.FAILURE_TRANSFER and journey.prefiller is not None:
            # Whoever saw it, the writer is the one that another attempt can avoid.
            identity = journey.prefiller
        elif failed.code == worker_pb2.FAILURE_LEASE:
            identity = None
        return AttemptFailed(worker_pb2.FailureCode.Name(failed.code)[8:].lower(), identity)

    def _accept(
        self, journey: _Journey, call: Call, output: worker_pb2.TokenOutput
    ) -> TokenEvent | None:
        """Turn a worker's tokens into an event without what was emitted before; None if empty."""
        if output.error:
            raise InvalidRequest(output.error)
        num_known = len(journey.emitted) - output.output_index
        if num_known < 0:
            raise AttemptFailed("token gap", call.session.identity)
        new_ids = list(output.token_ids[num_known:])
        finish_reason = _FINISH[output.finish_reason]
        if not new_ids and finish_reason is None:
            return None
        is_first = not journey.emitted
        journey.emitted.extend(new_ids)
        if journey.is_migrating:
            journey.is_migrating = False
            self._metrics.migrations.labels("success").inc()
        journey.overloaded_since_s = None
        return TokenEvent(
            token_ids=new_ids,
            logprobs=logprobs_of(output, num_known),
            prompt_logprobs=prompt_logprobs_of(output) if is_first else None,
            draft_token_ids=output.draft_token_ids,
            num_cached_tokens=output.num_cached_tokens if is_first else None,
            finish_reason=finish_reason,
        )

    def _waiting(self, journey: _Journey, inbox: CallInbox, call: Call) -> TokenEvent | None:
        """The tokens that follow, if they are there already."""

        def follows(entry: tuple[Call, CallMessage]) -> bool:
            output = entry[1]
            return (
                entry[0] is call
                and isinstance(output, worker_pb2.TokenOutput)
                and output.output_index == len(journey.emitted)
                and not output.error
            )

        entry = inbox.take_if(follows)
        if entry is None:
            return None
        assert isinstance(entry[1], worker_pb2.TokenOutput)
        return self._accept(journey, call, entry[1])

    async def _choose_decoder(self, journey: _Journey) -> tuple[WorkerSnapshot, list[bytes]]:
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
                salt = block_salt(decoders[0].kv_identity, request.adapter, request.cache_salt)
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

    def _choose_prefiller(
        self,
        journey: _Journey,
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

    async def _recover(self, journey: _Journey, failure: AttemptFailed) -> None:
        """Decide whether another attempt may start; wait first where that helps.

        Raises: Unavailable: too many attempts failed.
        """
        self._metrics.retries.labels(failure.reason.replace(" ", "_")).inc()
        if journey.emitted:
            journey.is_migrating = True
        if failure.is_overload:
            assert failure.blamed is not None
            journey.overloaded.add(failure.blamed)
            return
        if len(journey.emitted) - journey.num_emitted_before >= _PROGRESS_TOKENS:
            # A long stream may meet many failures in its life; only fruitless attempts add up.
            journey.num_failed = journey.num_remote_failures = 0
            journey.num_failures.clear()
        journey.num_failed += 1
        if failure.blamed is not None:
            journey.num_failures[failure.blamed] += 1
            journey.num_remote_failures += failure.blamed == journey.prefiller
        if journey.num_failed >= self._config.max_attempts:
            raise Unavailable(
                f"{journey.num_failed} attempts failed, the last one with: {failure.reason}",
                retry_after_s=1.0,
            )

    async def _back_off(self, journey: _Journey) -> None:
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
