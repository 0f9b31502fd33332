"""The prefiller's engine loop: it computes prompts, pushes their KV and reports the first token.

    Prefill --prefix fetched from the tiers, if there are any--> WAITING --> RUNNING (chunks; each
      layer pushed as it is written) --first token sampled, reported--> SENDING --all written-->
      Released
    any --Cancel, lease, deadline, session closed--> ending --nothing in flight--> Released

One thread owns everything here. Other threads put events into the inbox; answers leave through the
outbox. Blocks are freed only when the transfer says that it will never read them again.
"""

import logging
from dataclasses import dataclass

from engine.prefix_tiers import TierEvent, TierFound, TierLoaded, TierWritten
from engine.request import Request, RequestKey
from engine.scheduler import QueueFull, ScheduledRequest
from engine.worker.assembly import Engine
from engine.worker.convert import key_from_proto
from engine.worker.inbox import Inbox, SessionClosed, SessionMessage, StatsQuery, Stop
from engine.worker.intake import Intake
from engine.worker.kv_ranks import EngineSender, EngineTransfer
from kvtransfer.connector import BlockCopy, TransferResult
from protos import worker_pb2

PrefillEvent = SessionMessage | SessionClosed | StatsQuery | Stop | TransferResult | TierEvent

_IDLE_WAIT_S = 0.25

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Entry:
    """A request and its transfer."""

    request: Request
    target: worker_pb2.KVTarget
    transfer: EngineTransfer | None = None
    """Set at the first chunk; None again once it is quiet."""
    next_block: int = 0
    """First block of the prompt that was not pushed yet."""
    ending: bool = False


class PrefillLoop:
    """See the module's docstring."""

    def __init__(
        self, *, engine: Engine, intake: Intake, inbox: Inbox[PrefillEvent], sender: EngineSender
    ) -> None:
        self._scheduler = engine.scheduler
        self._blocks = engine.blocks
        self._steps = engine.steps
        self._counters = engine.counters
        self._intake = intake
        self._replies = intake.replies
        self._inbox = inbox
        self._sender = sender
        self._tiers = engine.tiers
        self._tiers.start(engine.blocks, inbox.put)
        self._entries: dict[RequestKey, _Entry] = {}
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
        """Take in what has arrived, compute one chunk, report first tokens."""
        for event in self._inbox.drain(0.0 if self._progressed else _IDLE_WAIT_S):
            self._dispatch(event)
        for key, reason in self._intake.overdue(self._entries):
            self._end(key, reason)
        self._schedule(self._tiers.overdue())
        self._replies.flush()
        output = self._scheduler.schedule()
        self._progressed = bool(output.scheduled)
        if output.scheduled:
            self._compute(output.scheduled)
        else:
            self._steps.idle()
        if self._replies.stats_due():
            self._replies.stats(self._stats())
            self._intake.publish_kv()
        self._replies.flush()

    def _compute(self, scheduled: list[ScheduledRequest]) -> None:
        pushes = [self._next_push(entry) for entry in scheduled]

        emitted = self._steps.run(scheduled, self._sender.pusher(pushes))
        self._replies.tokens(emitted)
        self._replies.flush()
        for request, _ in emitted:
            transfer = self._entries[request.key].transfer
            if transfer is None:
                # It failed during this step; the event that says so is in the inbox.
                continue
            if request.finish_reason is None:
                transfer.finish()
            else:
                transfer.abort("the first token ended the request")

    def _next_push(self, scheduled: ScheduledRequest) -> tuple[EngineTransfer, list[BlockCopy]]:
        """The blocks that this step completes, or leaves half full; same for every layer."""
        request = scheduled.request
        entry = self._entries[request.key]
        if entry.transfer is None:
            entry.transfer = self._sender.begin(request.key, entry.target, self._inbox.put)
            entry.next_block = entry.transfer.block_indices.start
        num_computed = request.num_computed_tokens + scheduled.num_tokens
        end_block = num_computed // self._blocks.block_size
        if scheduled.samples:
            end_block = self._blocks.num_blocks_for(num_computed)
        end_block = min(end_block, entry.transfer.block_indices.stop)
        copies = [
            BlockCopy(source_block_id=request.block_ids[index], block_index=index)
            for index in range(entry.next_block, end_block)
        ]
        entry.next_block = max(entry.next_block, end_block)
        return entry.transfer, copies

    def _dispatch(self, event: PrefillEvent) -> None:
        match event:
            case SessionMessage(session_id, message):
                self._dispatch_message(session_id, message)
            case TransferResult():
                self._on_transfer_result(event)
            case TierFound() | TierLoaded() | TierWritten():
                self._schedule(self._tiers.on_tier_event(event))
            case SessionClosed(session_id):
                for key in self._intake.of_session(session_id):
                    self._end(key, "the proxy's session closed")
            case StatsQuery(reply):
                reply.set_result(self._stats())
            case Stop():
                self._stopping = True

    def _dispatch_message(self, session_id: int, message: worker_pb2.ProxyMessage) -> None:
        match message.WhichOneof("message"):
            case "prefill":
                self._prefill(session_id, message.prefill)
            case "cancel":
                key = key_from_proto(message.cancel.key)
                if key in self._entries:
                    self._end(key, message.cancel.reason or "cancelled")
                else:
                    self._replies.unknown(session_id, key)
            case "renew":
                self._intake.renew(message.renew)
            case "set_adapter":
                entries = self._entries.values()
                self._intake.set_adapter(session_id, message.set_adapter, entries)
            case "resync_kv":
                self._intake.resync_kv(session_id)
            case kind:
                _log.warning("session %d sent %s, not for a prefiller", session_id, kind)
                self._counters.num_stale_messages += 1

    def _prefill(self, session_id: int, message: worker_pb2.Prefill) -> None:
        key, target = key_from_proto(message.key), message.target
        if key in self._entries:
            self._counters.num_stale_messages += 1
            return
        request = self._intake.admit(session_id, message.key, message.work, self._accept)
        if request is not None:
            self._entries[key] = _Entry(request, target)

    def _accept(self, request: Request) -> None:
        self._scheduler.validate(request)
        if not self._tiers.lookup(request):
            self._scheduler.add(request)

    def _schedule(self, keys: list[RequestKey]) -> None:
        """Requests that waited for the tiers join the queue."""
        for key in keys:
            try:
                self._scheduler.add(self._entries[key].request)
            except QueueFull as error:
                self._replies.failed(key, worker_pb2.FAILURE_OVERLOADED, str(error))
                self._end(key, str(error))

    def _on_transfer_result(self, result: TransferResult) -> None:
        entry = self._entries.get(result.key)
        if entry is None:
            self._counters.num_stale_messages += 1
            return
        entry.transfer = None
        if not result.ok and not entry.ending and entry.request.finish_reason is None:
            self._replies.failed(result.key, worker_pb2.FAILURE_TRANSFER, result.error)
        self._release(entry)

    def _end(self, key: RequestKey, reason: str) -> None:
        """Stop whatever is done for a key; its blocks go back once the transfer is quiet."""
        entry = self._entries[key]
        if entry.ending:
            return
        entry.ending = True
        if entry.transfer is None:
            self._release(entry)
            return
        self._leave_scheduler(entry.request)
        entry.transfer.abort(reason)

    def _leave_scheduler(self, request: Request) -> None:
        # NOTE: the scheduler frees the blocks of what it removes, but these may still be read.
        block_ids, request.block_ids = request.block_ids, []
        self._scheduler.remove(request)
        request.block_ids = block_ids

    def _release(self, entry: _Entry) -> None:
        request = entry.request
        self._scheduler.remove(request)
        self._tiers.forget(request.key)
        del self._entries[request.key]
        self._steps.forget(request.key)
        self._replies.released(request.key)

    def _stats(self) -> worker_pb2.WorkerStats:
        return self._intake.stats(self._sender.stats())
