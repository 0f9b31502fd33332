"""The decoder's engine loop: it reserves blocks, waits for their KV, and decodes.

    Reserve --> pending (no blocks yet) --> RESERVED
    RESERVED --Activate--> WAITING_FOR_REMOTE_KV --KV arrived--> RUNNING --> FINISHED
    RESERVED --KV arrived, then Activate--> RUNNING
    RESERVED --PrefillLocally--> WAITING --> RUNNING
    any --Cancel, lease, deadline, KV failed, session closed--> ending --writer quiet--> Released

While ending, blocks that a writer may still touch are in quarantine. One thread owns everything.
Other threads put events into the inbox; answers leave through the outbox.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.prefix_tiers import TierEvent, TierFound, TierLoaded, TierWritten
from engine.request import Request, RequestKey, RequestState
from engine.scheduler import QueueFull
from engine.worker.assembly import Engine
from engine.worker.convert import key_from_proto, key_to_proto
from engine.worker.inbox import Inbox, SessionClosed, SessionMessage, StatsQuery, Stop
from engine.worker.intake import Intake
from engine.worker.kv_ranks import EngineReceiver
from kvtransfer.connector import KVArrived, KVFailed, KVQuiet, ReceiveEvent
from protos import worker_pb2

DecodeEvent = SessionMessage | SessionClosed | StatsQuery | Stop | ReceiveEvent | TierEvent

_IDLE_WAIT_S = 0.25

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Entry:
    """A request and what the transfer still owes it."""

    request: Request
    num_remote_tokens: int
    """Tokens whose KV the writer delivers."""
    expecting: bool = False
    """A writer may be, or become, allowed to write into its blocks."""
    arrived: bool = False
    ending: bool = False
    quarantined: list[int] = field(default_factory=list)


class DecodeLoop:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        engine: Engine,
        intake: Intake,
        inbox: Inbox[DecodeEvent],
        receiver: EngineReceiver,
        rank_addresses: Sequence[str],
    ) -> None:
        self._hello = engine.hello
        self._scheduler = engine.scheduler
        self._blocks = engine.blocks
        self._steps = engine.steps
        self._counters = engine.counters
        self._intake = intake
        self._replies = intake.replies
        self._inbox = inbox
        self._receiver = receiver
        self._rank_addresses = list(rank_addresses)
        self._tiers = engine.tiers
        self._tiers.start(engine.blocks, inbox.put)
        self._entries: dict[RequestKey, _Entry] = {}
        self._pending: deque[RequestKey] = deque()
        self._stopping = False
        self._progressed = False

    def run(self) -> None:
        """Work until a Stop event."""
        while not self._stopping:
            self.step()

    def request_stop(self) -> None:
        """Make `run` return after the current step; any thread."""
        self._inbox.put(Stop())

    def step(self) -> None:
        """Take in what has arrived, run one engine step, send what it produced."""
        for event in self._inbox.drain(0.0 if self._progressed else _IDLE_WAIT_S):
            self._dispatch(event)
        for key, _ in self._intake.overdue(self._entries):
            self._end(key)
        self._admit_pending()
        self._replies.flush()
        output = self._scheduler.schedule()
        self._progressed = bool(output.scheduled)
        if output.scheduled:
            emitted = self._steps.run(output.scheduled)
            self._replies.tokens(emitted)
            for request, _ in emitted:
                if request.finish_reason is not None:
                    self._release(self._entries[request.key])
        else:
            self._steps.idle()
        if self._replies.stats_due():
            self._replies.stats(self._stats())
            self._intake.publish_kv()
        self._replies.flush()

    def _dispatch(self, event: DecodeEvent) -> None:
        match event:
            case SessionMessage(session_id, message):
                self._dispatch_message(session_id, message)
            case KVArrived(key):
                self._on_arrived(key)
            case KVFailed(key, reason, quiet):
                self._on_failed(key, reason, quiet)
            case KVQuiet(key):
                self._on_quiet(key)
            case TierFound() | TierLoaded() | TierWritten():
                self._tiers.on_tier_event(event)
            case SessionClosed(session_id):
                for key in self._intake.of_session(session_id):
                    self._end(key)
            case StatsQuery(reply):
                reply.set_result(self._stats())
            case Stop():
                self._stopping = True

    def _dispatch_message(self, session_id: int, message: worker_pb2.ProxyMessage) -> None:
        match message.WhichOneof("message"):
            case "reserve":
                self._reserve(session_id, message.reserve)
            case "activate":
                self._activate(message.activate)
            case "prefill_locally":
                self._prefill_locally(key_from_proto(message.prefill_locally.key))
            case "cancel":
                self._cancel(session_id, key_from_proto(message.cancel.key))
            case "renew":
                self._intake.renew(message.renew)
            case "set_adapter":
                entries = self._entries.values()
                self._intake.set_adapter(session_id, message.set_adapter, entries)
            case "resync_kv":
                self._intake.resync_kv(session_id)
            case kind:
                _log.warning("session %d sent %s, which a decoder does not take", session_id, kind)
                self._counters.num_stale_messages += 1

    def _reserve(self, session_id: int, message: worker_pb2.Reserve) -> None:
        if key_from_proto(message.key) in self._entries:
            self._counters.num_stale_messages += 1
            return
        self._intake.admit(session_id, message.key, message.work, self._accept)

    def _accept(self, request: Request) -> None:
        self._scheduler.validate(request)
        bound = self._scheduler.config.max_num_waiting
        if len(self._pending) >= bound:
            raise QueueFull(f"{len(self._pending)} requests wait for blocks, the bound is {bound}")
        request.state = RequestState.RESERVED
        self._entries[request.key] = _Entry(request, num_remote_tokens=request.num_tokens)
        self._pending.append(request.key)

    def _admit_pending(self) -> None:
        """Give blocks to reservations, in order; one that does not fit holds up those behind it."""
        # NOTE: preempted requests come first, or new reservations could starve them.
        while self._pending and not self._scheduler.has_preempted:
            entry = self._entries[self._pending[0]]
            request = entry.request
            num_spare = self._scheduler.num_running
            if not self._blocks.fits(request, request.num_tokens, num_spare):
                return
            self._pending.popleft()
            self._blocks.attach_prefix(request)
            allocated = self._blocks.allocate(request, request.num_tokens)
            assert allocated, f"{request.key} fits, but was not given its blocks"
            self._offer(entry)

    def _offer(self, entry: _Entry) -> None:
        request = entry.request
        first_block = request.num_cached_tokens // self._blocks.block_size
        block_ids = request.block_ids[first_block:]
        self._receiver.expect(
            request.key, block_ids, first_block=first_block, num_tokens=request.num_tokens
        )
        entry.expecting = True
        # The first decode step may start a new block; asking now spares a preemption.
        self._blocks.allocate(request, request.num_tokens + 1)
        target = worker_pb2.KVTarget(
            engine_id=self._hello.engine_id,
            incarnation=self._hello.incarnation,
            link_address=self._rank_addresses[0],
            rank_addresses=self._rank_addresses,
            first_block=first_block,
            block_ids=block_ids,
            block_size=self._blocks.block_size,
            num_tokens=request.num_tokens,
        )
        self._replies.send(
            request.key,
            worker_pb2.WorkerMessage(
                reserved=worker_pb2.Reserved(
                    key=key_to_proto(request.key),
                    num_cached_tokens=request.num_cached_tokens,
                    target=target,
                )
            ),
        )

    def _activate(self, message: worker_pb2.Activate) -> None:
        entry = self._live_entry(key_from_proto(message.key))
        if entry is None or entry.request.state is not RequestState.RESERVED:
            self._counters.num_stale_messages += 1
            return
        entry.request.token_ids.extend(message.token_ids)
        entry.request.draft_token_ids = list(message.draft_token_ids)
        entry.request.state = RequestState.WAITING_FOR_REMOTE_KV
        if entry.arrived:
            self._start(entry)

    def _start(self, entry: _Entry) -> None:
        """Join the next decode step: the KV of all tokens but the newest is here."""
        request = entry.request
        request.num_computed_tokens = entry.num_remote_tokens
        self._blocks.register_computed(request)
        try:
            self._scheduler.add_running(request)
        except ValueError as error:
            self._replies.failed(request.key, worker_pb2.FAILURE_INVALID, str(error))
            self._end(request.key)

    def _prefill_locally(self, key: RequestKey) -> None:
        entry = self._live_entry(key)
        if entry is None or entry.request.state is not RequestState.RESERVED or entry.arrived:
            self._counters.num_stale_messages += 1
            return
        self._receiver.cancel(key)  # nobody was told to write: quiet at once
        try:
            self._scheduler.add(entry.request)
        except QueueFull as error:
            self._replies.failed(key, worker_pb2.FAILURE_OVERLOADED, str(error))
            self._end(key)

    def _cancel(self, session_id: int, key: RequestKey) -> None:
        if key in self._entries:
            self._end(key)
            return
        self._replies.unknown(session_id, key)

    def _on_arrived(self, key: RequestKey) -> None:
        entry = self._entries.get(key)
        if entry is None:
            self._counters.num_stale_messages += 1
            return
        entry.expecting = False
        entry.arrived = True
        if entry.ending:
            self._release(entry)
        elif entry.request.state is RequestState.WAITING_FOR_REMOTE_KV:
            self._start(entry)

    def _on_failed(self, key: RequestKey, reason: str, quiet: bool) -> None:
        entry = self._entries.get(key)
        if entry is None:
            self._counters.num_stale_messages += 1
            return
        entry.expecting = not quiet
        if not entry.ending:
            self._replies.failed(key, worker_pb2.FAILURE_TRANSFER, reason)
            self._quarantine(entry)
        if quiet:
            self._release(entry)

    def _on_quiet(self, key: RequestKey) -> None:
        entry = self._entries.get(key)
        if entry is None:
            self._counters.num_stale_messages += 1
            return
        entry.expecting = False
        if entry.ending:
            self._release(entry)

    def _live_entry(self, key: RequestKey) -> _Entry | None:
        entry = self._entries.get(key)
        return None if entry is None or entry.ending else entry

    def _end(self, key: RequestKey) -> None:
        """Stop whatever is done for a key; its blocks go back once no writer can touch them."""
        entry = self._live_entry(key)
        if entry is None:
            return
        if key in self._pending:
            self._pending.remove(key)
        if entry.expecting:
            self._quarantine(entry)
            self._receiver.cancel(key)
        else:
            self._release(entry)

    def _quarantine(self, entry: _Entry) -> None:
        entry.ending = True
        request = entry.request
        if self._scheduler.get(request.key) is not None:
            # A local prefill: its blocks are its own, the writer's grant was taken back.
            self._scheduler.remove(request)
        else:
            entry.quarantined = self._blocks.quarantine(request)

    def _release(self, entry: _Entry) -> None:
        """Nothing outside touches the blocks any more: free all and say so."""
        request = entry.request
        self._scheduler.remove(request)
        self._blocks.release_quarantined(entry.quarantined)
        del self._entries[request.key]
        self._steps.forget(request.key)
        self._replies.released(request.key)

    def _stats(self) -> worker_pb2.WorkerStats:
        return self._intake.stats(self._receiver.stats(), num_pending=len(self._pending))
