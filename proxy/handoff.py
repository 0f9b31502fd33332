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
from collections import deque
from contextlib import closing
from functools import partial

from protos import worker_pb2
from proxy.config import ProxyConfig
from proxy.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from proxy.inbox import Inbox, TurnQueue
from proxy.journey import AttemptFailed, Journey, TokenSink
from proxy.metrics import ProxyMetrics
from proxy.placement import Placement
from proxy.request import Phase, Progress, SequenceRequest, TokenEvent
from proxy.router import Router
from proxy.session import Call, CallInbox, CallMessage, PlainToken, SessionLost
from proxy.workers import WorkerPool

# More would make events, and what is buffered for a client that stops reading, large.
_MAX_JOINED_TOKENS = 32


class Handoff:
    """Runs sequences on the workers of a pool."""

    def __init__(
        self, config: ProxyConfig, pool: WorkerPool, router: Router, metrics: ProxyMetrics
    ) -> None:
        self._config = config
        self._pool = pool
        self._router = router
        self._metrics = metrics
        self._placement = Placement(config, pool, router, metrics)
        self._turns = TurnQueue()

    async def run(self, request: SequenceRequest, progress: Progress, sink: TokenSink) -> None:
        """Push each output token exactly once, in order, until the sink is finished.

        Cancellation leaves nothing at the workers.

        Raises: InvalidRequest, Overloaded, Unavailable, DeadlineExceeded: before or after tokens.
        """
        journey = Journey(request, progress, sink, self._metrics)
        try:
            while True:
                try:
                    await self._attempt(journey)
                    return
                except AttemptFailed as failure:
                    journey.recover(failure, self._config.max_attempts)
        except (InvalidRequest, Overloaded, Unavailable, DeadlineExceeded):
            if journey.is_migrating:
                self._metrics.migrations.labels("failed").inc()
            raise

    async def _attempt(self, journey: Journey) -> None:
        journey.progress.phase = Phase.RESERVE
        decoder, hashes = await self._placement.choose_decoder(journey)
        key = journey.begin_attempt(decoder.identity)
        inbox: CallInbox = Inbox(self._turns)
        work = journey.work(_now_s())
        session = self._pool.session(decoder.identity)
        with closing(inbox), session.open(key, inbox) as reservation:
            reserve = worker_pb2.Reserve(key=reservation.proto_key(), work=work)
            reservation.send(worker_pb2.ProxyMessage(reserve=reserve))
            reserved = await self._await_reserved(journey, inbox)
            num_uncached = len(work.token_ids) - reserved.num_cached_tokens
            prefiller = self._placement.choose_prefiller(
                journey, len(work.token_ids), num_uncached, hashes, decoder
            )
            journey.prefiller = prefiller
            journey.progress.phase = Phase.PREFILL
            if prefiller is None:
                session.expect(reservation, num_uncached)
                locally = worker_pb2.PrefillLocally(key=reservation.proto_key())
                reservation.send(worker_pb2.ProxyMessage(prefill_locally=locally))
                timeout_s = self._config.first_token_timeout_s
                first, _ = await self._await_token(journey, inbox, reservation, timeout_s, "token")
                self._router.note(hashes, decoder.identity)
                await self._go_on(journey, inbox, reservation, first)
                return
            prefill_session = self._pool.session(prefiller)
            with prefill_session.open(key, inbox, pending_tokens=num_uncached) as prefill:
                message = worker_pb2.Prefill(
                    key=prefill.proto_key(), work=work, target=reserved.target
                )
                prefill.send(worker_pb2.ProxyMessage(prefill=message))
                await self._hand_over(journey, inbox, reservation, prefill, hashes)

    async def _hand_over(
        self,
        journey: Journey,
        inbox: CallInbox,
        reservation: Call,
        prefill: Call,
        hashes: list[bytes],
    ) -> None:
        """Wait for the prefiller's token, hand it to the decoder, and go on there."""
        timeout_s = self._config.first_token_timeout_s
        first, output = await self._await_token(journey, inbox, prefill, timeout_s, "prefill")
        # NOTE: the first token goes out before Activate, so that a stop string found in it
        # ends the request without any decode work.
        self._router.note(hashes, reservation.session.identity)
        self._router.note(hashes, prefill.session.identity)
        if not await journey.emit(first):
            return
        journey.progress.phase = Phase.TRANSFER
        activate = worker_pb2.Activate(
            key=reservation.proto_key(),
            token_ids=first.token_ids,
            draft_token_ids=output.draft_token_ids,
        )
        reservation.send(worker_pb2.ProxyMessage(activate=activate))
        timeout_s = self._config.token_timeout_s
        second, _ = await self._await_token(journey, inbox, reservation, timeout_s, "token")
        # A decoded token proves that the KV arrived: the prefiller needs us no more.
        prefill.session.detach(prefill)
        await self._go_on(journey, inbox, reservation, second)

    async def _await_reserved(self, journey: Journey, inbox: CallInbox) -> worker_pb2.Reserved:
        while True:
            call, message = await self._next(
                journey, inbox, self._config.reserve_timeout_s, waiting_for="reservation"
            )
            if isinstance(message, worker_pb2.Reserved):
                return message
            if isinstance(message, worker_pb2.Released):
                raise AttemptFailed("released early", call.session.identity)

    async def _await_token(
        self, journey: Journey, inbox: CallInbox, source: Call, timeout_s: float, waiting_for: str
    ) -> tuple[TokenEvent, worker_pb2.TokenOutput]:
        """Wait for the next new token of one worker; its event and its message."""
        while True:
            call, message = await self._next(journey, inbox, timeout_s, waiting_for=waiting_for)
            if isinstance(message, worker_pb2.Released):
                # A prefiller may let go before the decoder's first token.
                if call is source or waiting_for == "prefill":
                    raise AttemptFailed("released early", call.session.identity)
            elif call is source and isinstance(message, worker_pb2.TokenOutput):
                call.session.settle(call)
                event = journey.accept(call, message)
                if event is not None:
                    return event, message

    async def _go_on(
        self, journey: Journey, inbox: CallInbox, decode: Call, first: TokenEvent
    ) -> None:
        """Emit the decoder's tokens, from the first one that came, to the end."""
        journey.progress.phase = Phase.DECODE

        take = partial(_take, journey, decode)
        is_open = await journey.emit(first)
        while is_open:
            try:
                await inbox.consume(
                    take,
                    timeout_s=self._config.token_timeout_s,
                    deadline_s=journey.request.deadline_s,
                )
            except TimeoutError:
                raise _timed_out(journey, "token") from None
            if journey.sink.is_finished:
                return
            await journey.sink.ready()
            other = inbox.take_if(lambda entry: not _is_token(entry, decode))
            if other is not None:
                _check(journey, *other)
                if other[0] is decode and isinstance(other[1], worker_pb2.Released):
                    raise AttemptFailed("released early", decode.session.identity)

    async def _next(
        self, journey: Journey, inbox: CallInbox, timeout_s: float, *, waiting_for: str
    ) -> tuple[Call, CallMessage]:
        """Take the next message that is not a failure.

        Raises: AttemptFailed: on a failure, a lost session or a timeout of the workers;
            InvalidRequest: when a worker says that no retry can help; DeadlineExceeded.
        """
        try:
            entry = await inbox.get(min(_now_s() + timeout_s, journey.request.deadline_s))
        except TimeoutError:
            raise _timed_out(journey, waiting_for) from None
        _check(journey, *entry)
        call, message = entry
        return call, _output(message) if isinstance(message, tuple) else message


def _check(journey: Journey, call: Call, message: CallMessage) -> None:
    """Raise what a message says of a failure."""
    if isinstance(message, SessionLost):
        raise AttemptFailed("worker lost", call.session.identity)
    if isinstance(message, worker_pb2.Failed):
        raise journey.failure(call, message)


def _timed_out(journey: Journey, waiting_for: str) -> Exception:
    if _now_s() >= journey.request.deadline_s:
        return DeadlineExceeded("the request ran out of time")
    suspect = journey.prefiller if waiting_for == "prefill" else journey.decoder
    return AttemptFailed(f"{waiting_for} timeout", suspect)


def _is_token(entry: tuple[Call, CallMessage], decode: Call) -> bool:
    return entry[0] is decode and isinstance(entry[1], tuple | worker_pb2.TokenOutput)


def _output(token: PlainToken) -> worker_pb2.TokenOutput:
    """A token as it comes where there is more to say of it."""
    return worker_pb2.TokenOutput(output_index=token[0], token_ids=token[1:])


def _take(journey: Journey, decode: Call, messages: deque[tuple[Call, CallMessage]]) -> bool:
    """Push what the decoder sent; False: something else has to be looked at first, or awaited."""
    token_ids = _plain(journey, decode, messages)
    if token_ids and not messages:
        return journey.sink.push_tokens(token_ids)
    event = _joined(journey, decode, messages, token_ids)
    return event is not None and journey.sink.push(event)


def _plain(journey: Journey, decode: Call, messages: deque[tuple[Call, CallMessage]]) -> list[int]:
    """Take the plain tokens that are next, and count them as emitted; most often they are all."""
    emitted = journey.emitted
    num_emitted = len(emitted)
    token_ids: list[int] = []
    while messages and len(token_ids) < _MAX_JOINED_TOKENS:
        call, message = messages[0]
        if call is not decode or not isinstance(message, tuple) or message[0] != num_emitted:
            break
        messages.popleft()
        token_ids.append(message[1])
        num_emitted += 1
    emitted += token_ids
    return token_ids


def _joined(
    journey: Journey,
    decode: Call,
    messages: deque[tuple[Call, CallMessage]],
    token_ids: list[int],
) -> TokenEvent | None:
    """What the decoder sent after the plain `token_ids`, with them, as one event.

    None: something else has to be looked at first.
    """
    event = TokenEvent(token_ids) if token_ids else None
    while messages:
        call, message = messages[0]
        if isinstance(message, tuple):
            message = _output(message)
        if call is not decode or not isinstance(message, worker_pb2.TokenOutput):
            break
        if event is not None and not journey.follows(message):
            break
        messages.popleft()
        more = journey.accept(call, message)
        if more is None:
            continue
        event = more if event is None else event.joined(more)
        if event.finish_reason is not None or len(event.token_ids) >= _MAX_JOINED_TOKENS:
            break
    return event


def _now_s() -> float:
    return asyncio.get_running_loop().time()
