"""One bidirectional stream to one worker, shared by all requests of this proxy.

    Call (one attempt at this worker):
        open -> [messages go to its inbox] -> over (finish, Failed, session lost) -> released
                     | detach: nobody listens any more; renewed until released
                     | close:  Cancel is sent if the call is not over

A session lives from one successful dial to its break. When it breaks, every call on it gets a
`SessionLost` at once; the worker does the same on its side.
"""

import asyncio
import enum
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from protos import worker_pb2, worker_pb2_grpc
from proxy.config import ProxyConfig
from proxy.inbox import Inbox
from proxy.kv_subscription import KVSubscription
from proxy.prefix_index import PrefixIndex
from proxy.ticks import until_tick_s

logger = logging.getLogger(__name__)

Identity = tuple[str, int]
"""(engine_id, incarnation) of a worker."""

Key = tuple[str, int]
"""(request_id, attempt)."""

_Stream: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.ProxyMessage, worker_pb2.WorkerMessage]"

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MAX_QUEUED_MESSAGES = 65536
_RECONCILE_AFTER_S = 2.0

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # Else a ping follows each message, to measure the connection: a fixed window will do.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
    # A new dial must not inherit the back-off of the dial before it.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


def token_metadata(cluster_token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that proves membership of the cluster."""
    return (("x-pdserve-token", cluster_token),) if cluster_token else ()


def raise_if_cancelled() -> None:
    """Repeat a cancellation that grpc.aio swallowed.

    A call that is cancelled while it connects ends with the connection's error instead.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class SessionBroken(Exception):
    """The stream to a worker ended, or never worked."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    """Delivered to every call of a session that broke."""

    reason: str


PlainToken: TypeAlias = tuple[int, int]
"""(output_index, token_id) of a token with nothing else to say."""

CallMessage = (
    worker_pb2.Reserved
    | worker_pb2.TokenOutput
    | PlainToken
    | worker_pb2.Failed
    | worker_pb2.Released
    | SessionLost
)


class CallState(enum.Enum):
    """Who still does something about a call."""

    OPEN = "open"
    DETACHED = "detached"
    CLOSED = "closed"


@dataclass(slots=True, eq=False)
class Call:
    """One attempt of one request at one worker."""

    session: "WorkerSession"
    key: Key
    inbox: "CallInbox"
    pending_tokens: int
    """Prompt tokens that this call makes the worker compute; 0 once the first token came."""
    state: CallState = CallState.OPEN
    is_over: bool = False
    """The worker ended it by itself: nothing to cancel."""
    closed_s: float = 0.0
    is_active: bool = True
    """Counted in the session's num_active."""

    def send(self, message: worker_pb2.ProxyMessage) -> None:
        """Queue a message to the worker; lost if the session broke (the inbox knows)."""
        self.session.send(message)

    def proto_key(self) -> worker_pb2.RequestKey:
        """The key as it goes over the wire."""
        return worker_pb2.RequestKey(request_id=self.key[0], attempt=self.key[1])


CallInbox: TypeAlias = Inbox[tuple[Call, CallMessage]]
"""Messages for one attempt from all of its workers."""


@dataclass(slots=True)
class SessionCounters:
    """What went wrong on sessions to one worker, over reconnects."""

    num_stale_messages: int = 0
    num_breaks: int = 0
    num_unreleased: int = 0
    """Keys forgotten because the worker reported no leases, without a Released."""


@dataclass(slots=True, eq=False)
class WorkerSession:
    """Send to, and dispatch from, one worker; `run` is its whole life."""

    address: str
    identity: Identity
    config: ProxyConfig
    counters: SessionCounters
    on_greeted: Callable[[], None]
    """Called once the worker can be given work."""
    first_messages: Callable[[], list[worker_pb2.ProxyMessage]] = list
    """What the worker is told before any request."""
    on_adapter: Callable[[Identity, worker_pb2.AdapterChanged], None] = lambda _, __: None
    """Called with its answers to SetAdapter."""
    index: PrefixIndex = field(default_factory=PrefixIndex)
    """Kept to what the worker says that it holds."""
    hello: worker_pb2.WorkerHello | None = None
    stats: worker_pb2.WorkerStats | None = None
    is_broken: bool = False
    pending_tokens: int = 0
    """Prompt tokens sent and not yet answered with a first token."""
    num_active: int = 0
    """Calls that still want something from the worker."""
    _calls: dict[Key, Call] = field(default_factory=dict)
    _outgoing: asyncio.Queue[worker_pb2.ProxyMessage] = field(
        default_factory=lambda: asyncio.Queue(_MAX_QUEUED_MESSAGES)
    )
    _broke: asyncio.Event = field(default_factory=asyncio.Event)
    _kv: KVSubscription = field(init=False)

    def __post_init__(self) -> None:
        self._kv = KVSubscription(self.index, self.identity, self.send)

    @property
    def is_usable(self) -> bool:
        """Greeted and not broken."""
        return self.hello is not None and not self.is_broken

    @property
    def num_pending_release(self) -> int:
        """Keys that ended for the proxy and that the worker has not released."""
        return len(self._calls) - self.num_active

    @property
    def is_idle(self) -> bool:
        """No key is tracked."""
        return not self._calls

    @contextmanager
    def open(self, key: Key, inbox: CallInbox, *, pending_tokens: int = 0) -> Iterator[Call]:
        """Track `key` until released; on exit cancel it unless it is over or detached."""
        call = Call(self, key, inbox, pending_tokens)
        if not self.is_usable:
            call.is_over = True
            inbox.put((call, SessionLost("session is not connected")))
            yield call
            return
        self.pending_tokens += pending_tokens
        self.num_active += 1
        self._calls[key] = call
        try:
            yield call
        finally:
            self._close(call)

    def detach(self, call: Call) -> None:
        """Stop listening to a call whose worker will finish by itself."""
        if call.state is CallState.OPEN:
            call.state = CallState.DETACHED
            self._deactivate(call)
            call.closed_s = asyncio.get_running_loop().time()

    def expect(self, call: Call, pending_tokens: int) -> None:
        """Count prompt tokens of an open call as the worker's load, until it is settled."""
        self.settle(call)
        if call.state is CallState.OPEN and self.is_usable:
            call.pending_tokens = pending_tokens
            self.pending_tokens += pending_tokens

    def settle(self, call: Call) -> None:
        """Take the call's prompt tokens off the worker's load; idempotent."""
        self.pending_tokens -= call.pending_tokens
        call.pending_tokens = 0

    def send(self, message: worker_pb2.ProxyMessage) -> None:
        """Queue a message; a worker that reads so slowly that it fills up breaks its session."""
        if self.is_broken:
            return
        try:
            self._outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self._broke.set()

    def _deactivate(self, call: Call) -> None:
        self.num_active -= call.is_active
        call.is_active = False

    def _close(self, call: Call) -> None:
        self.settle(call)
        self._deactivate(call)
        if call.state is not CallState.OPEN:
            return
        call.state = CallState.CLOSED
        call.closed_s = asyncio.get_running_loop().time()
        if not call.is_over:
            cancel = worker_pb2.Cancel(key=call.proto_key(), reason="the attempt ended")
            self.send(worker_pb2.ProxyMessage(cancel=cancel))

    async def run(self) -> None:
        """Dial, greet, then move messages until the session breaks or this is cancelled.

        Raises: SessionBroken: always, with the reason, unless cancelled.
        """
        reason = "session closed"
        try:
            async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
                stub = worker_pb2_grpc.WorkerStub(channel)
                stream = stub.Session(metadata=token_metadata(self.config.cluster_token))
                await self._greet(stream)
                await self._move(stream)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except (SessionBroken, OSError, TimeoutError, asyncio.InvalidStateError) as error:
            reason = str(error) or type(error).__name__
        finally:
            self._break(reason)
        raise_if_cancelled()
        raise SessionBroken(reason)

    async def _greet(self, stream: _Stream) -> None:
        try:
            async with asyncio.timeout(self.config.connect_timeout_s):
                first = await stream.read()
        except TimeoutError:
            raise SessionBroken(
                f"no greeting from {self.address} in {self.config.connect_timeout_s} s"
            ) from None
        if not isinstance(first, worker_pb2.WorkerMessage):
            raise SessionBroken("the worker ended the session before its greeting")
        if first.WhichOneof("message") != "hello":
            raise SessionBroken("the worker's first message is not its greeting")
        found = (first.hello.engine_id, first.hello.incarnation)
        if found != self.identity:
            raise SessionBroken(f"{self.address} is {found}, expected {self.identity}")
        self.hello = first.hello
        for message in self.first_messages():
            self.send(message)
        self._kv.start()
        self.on_greeted()

    async def _move(self, stream: _Stream) -> None:
        tasks = [
            asyncio.create_task(self._read(stream)),
            asyncio.create_task(self._write(stream)),
            asyncio.create_task(self._renew()),
            asyncio.create_task(self._await_overflow()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _await_overflow(self) -> None:
        await self._broke.wait()
        raise SessionBroken(f"the worker reads too slowly: {_MAX_QUEUED_MESSAGES} messages wait")

    async def _read(self, stream: _Stream) -> None:
        loop = asyncio.get_running_loop()
        silence_s = self.config.worker_silence_s
        try:
            async with asyncio.timeout(silence_s) as silence:
                while isinstance(message := await stream.read(), worker_pb2.WorkerMessage):
                    silence.reschedule(loop.time() + silence_s)
                    self._dispatch(message)
        except TimeoutError:
            raise SessionBroken(f"the worker was silent for {silence_s} s") from None
        raise SessionBroken("the worker ended the session")

    async def _write(self, stream: _Stream) -> None:
        while True:
            await stream.write(await self._outgoing.get())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(until_tick_s(self.config.lease_renew_s))
            keys = [
                call.proto_key()
                for call in self._calls.values()
                if call.state is not CallState.CLOSED and not call.is_over
            ]
            if keys:
                self.send(worker_pb2.ProxyMessage(renew=worker_pb2.Renew(keys=keys)))

    def _dispatch(self, message: worker_pb2.WorkerMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "step":
            self._deal_out(message.step.plain)
            for output in message.step.outputs:
                is_over = output.finish_reason != worker_pb2.FINISH_NONE
                self._deliver(output, is_over=is_over)
        elif kind == "reserved":
            self._deliver(message.reserved, is_over=False)
        elif kind == "failed":
            self._deliver(message.failed, is_over=True)
        elif kind == "released":
            self._deliver(message.released, is_over=True)
            self._calls.pop(_key(message.released), None)
        elif kind == "adapter_changed":
            self.on_adapter(self.identity, message.adapter_changed)
        elif kind == "stats":
            self.stats = message.stats
            self._reconcile()
        elif kind == "kv_events":
            self._kv.apply(message.kv_events)

    def _deal_out(self, tokens: worker_pb2.PlainTokens) -> None:
        calls, is_open = self._calls, CallState.OPEN
        # NOTE: a slice is a list at once; to iterate over the field itself costs a call per entry.
        keys = zip(tokens.request_id[:], tokens.attempt[:], strict=True)
        entries = zip(tokens.output_index[:], tokens.token_id[:], strict=True)
        for key, token in zip(keys, entries, strict=True):
            call = calls.get(key)
            if call is not None and call.state is is_open:
                call.inbox.put((call, token))
            elif call is None or call.state is CallState.CLOSED:
                self.counters.num_stale_messages += 1

    def _deliver(
        self,
        message: worker_pb2.Reserved
        | worker_pb2.TokenOutput
        | worker_pb2.Failed
        | worker_pb2.Released,
        *,
        is_over: bool,
    ) -> None:
        call = self._calls.get(_key(message))
        if call is None:
            self.counters.num_stale_messages += 1
            return
        if is_over and not call.is_over:
            call.is_over = True
            call.closed_s = asyncio.get_running_loop().time()
            self._deactivate(call)
        if call.state is CallState.OPEN:
            call.inbox.put((call, message))
        elif call.state is CallState.CLOSED and not is_over:
            self.counters.num_stale_messages += 1

    def _reconcile(self) -> None:
        """Forget ended keys that a worker without leases never released: no drift."""
        if self.stats is None or self.stats.num_leases > 0:
            return
        before_s = asyncio.get_running_loop().time() - _RECONCILE_AFTER_S
        for key, call in list(self._calls.items()):
            ended = call.is_over or call.state is not CallState.OPEN
            if ended and call.closed_s < before_s:
                del self._calls[key]
                self.counters.num_unreleased += 1

    def _break(self, reason: str) -> None:
        if self.hello is not None:
            self.counters.num_breaks += 1
        self.is_broken = True
        self._kv.close()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            self.settle(call)
            self._deactivate(call)
            if call.state is CallState.OPEN:
                call.is_over = True
                call.inbox.put((call, SessionLost(reason)))


def _key(
    message: worker_pb2.Reserved | worker_pb2.TokenOutput | worker_pb2.Failed | worker_pb2.Released,
) -> Key:
    return (message.key.request_id, message.key.attempt)
