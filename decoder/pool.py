"""The requests of one data-parallel rank of a decoder, from their reservation to their end.

    Reserve --> pending (no blocks yet) --> RESERVED
    RESERVED --Activate--> WAITING_FOR_REMOTE_KV --KV arrived--> RUNNING --> FINISHED
    RESERVED --KV arrived, then Activate--> RUNNING
    RESERVED --PrefillLocally, prefix fetched from the tiers--> WAITING --> RUNNING
    any --Cancel, lease, deadline, KV failed, session closed--> ending --writer quiet--> Released

While ending, blocks that a writer may still touch are in quarantine. Owned by the loop's thread.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.prefix_tiers import TierEvent
from engine.request import Request, RequestKey, RequestState
from engine.scheduler import QueueFull
from engine.scheduler_output import ScheduledRequest
from engine.worker.assembly import Engine, Pool
from engine.worker.balance import Load
from engine.worker.convert import key_to_proto, token_ids_from_proto
from engine.worker.kv_ranks import EngineReceiver
from engine.worker.replies import Replies
from kvtransfer.connector import KVArrived, KVFailed, KVQuiet, ReceiveEvent
from protos import worker_pb2


@dataclass(slots=True, eq=False)
class Entry:
    """A request and what the transfer still owes it."""

    request: Request
    num_remote_tokens: int
    """Tokens whose KV the writer delivers."""
    expecting: bool = False
    """A writer may be, or become, allowed to write into its blocks."""
    arrived: bool = False
    is_local: bool = False
    """It is to be prefilled here."""
    ending: bool = False
    quarantined: list[int] = field(default_factory=list)


class DecodePool:
    """See the module's docstring."""

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        replies: Replies,
        receiver: EngineReceiver,
        rank_addresses: Sequence[str],
    ) -> None:
        """rank_addresses: where the ranks of `receiver` listen, by tp_rank."""
        self._hello = engine.hello
        self._steps = engine.steps
        self._tiers = pool.tiers
        self._counters = engine.counters
        self._scheduler = pool.scheduler
        self._blocks = pool.blocks
        self._replies = replies
        self._receiver = receiver
        self._rank_addresses = list(rank_addresses)
        self._entries: dict[RequestKey, Entry] = {}
        self._pending: deque[RequestKey] = deque()

    @property
    def entries(self) -> Mapping[RequestKey, Entry]:
        """Everything that is not released."""
        return self._entries

    @property
    def num_pending(self) -> int:
        """Requests that wait for blocks."""
        return len(self._pending)

    def load_with(self, request: Request) -> Load:
        """How busy it would be with one more request, whose KV comes from elsewhere."""
        blocks, config = self._blocks, self._scheduler.config
        waiting = [self._entries[key].request for key in self._pending]
        num_wanted = sum(blocks.num_blocks_for(r.num_tokens) for r in (*waiting, request))
        return Load(
            num_requests=len(self._entries) + 1,
            max_num_requests=config.max_num_seqs,
            num_tokens=self._scheduler.num_pending_tokens,
            max_num_tokens=config.max_num_batched_tokens,
            num_blocks=blocks.num_held_blocks + num_wanted - blocks.num_matched(request),
            max_num_blocks=blocks.num_blocks,
        )

    def accept(self, request: Request) -> None:
        """Take a new request, which waits for its blocks.

        Raises: ValueError: it can never run here. QueueFull: too many wait.
        """
        self._scheduler.limits.validate(request)
        bound = self._scheduler.config.max_num_waiting
        if len(self._pending) >= bound:
            raise QueueFull(f"{len(self._pending)} requests wait for blocks, the bound is {bound}")
        request.state = RequestState.RESERVED
        self._entries[request.key] = Entry(request, num_remote_tokens=request.num_tokens)
        self._pending.append(request.key)

    def schedule(self) -> list[ScheduledRequest]:
        """What the next step computes; blocks that are free go to reservations first."""
        self._take_in()
        return self._scheduler.schedule().scheduled

    def schedule_ahead(self) -> list[ScheduledRequest] | None:
        """`schedule` while a step runs; see Scheduler.schedule_ahead."""
        self._take_in()
        return self._scheduler.schedule_ahead()

    def activate(self, key: RequestKey, message: worker_pb2.Activate) -> None:
        """The first token of a reserved request is known: decode once its KV is here.

        A message that comes too early or too late is counted; tokens that are none end the request.
        """
        entry = self._reserved_entry(key)
        if entry is None:
            return
        vocab_size = self._hello.vocab_size
        try:
            token_ids = token_ids_from_proto(message.token_ids, vocab_size)
            draft_token_ids = token_ids_from_proto(message.draft_token_ids, vocab_size, least=0)
        except ValueError as error:
            self._replies.failed(key, worker_pb2.FAILURE_INVALID, str(error))
            self.end(key, str(error))
            return
        entry.request.token_ids.extend(token_ids)
        entry.request.draft_token_ids = draft_token_ids
        entry.request.state = RequestState.WAITING_FOR_REMOTE_KV
        if entry.arrived:
            self._start(entry)

    def prefill_locally(self, key: RequestKey) -> None:
        """Nobody will write: compute the prompt here; a message at the wrong time is counted."""
        entry = self._reserved_entry(key, may_have_arrived=False)
        if entry is None:
            return
        entry.is_local = True
        self._receiver.cancel(key)  # nobody was told to write: quiet at once
        if not self._tiers.lookup(entry.request):
            self._compute(entry.request)

    def take_fetched(self, event: TierEvent) -> None:
        """The tiers have done something for this pool."""
        self._prefill_fetched(self._tiers.on_tier_event(event))

    def on_receive_event(self, event: ReceiveEvent) -> None:
        """Something about the KV of a request of this pool."""
        entry = self._entries[event.key]
        match event:
            case KVArrived():
                self._on_arrived(entry)
            case KVFailed():
                self._on_failed(entry, event)
            case KVQuiet():
                entry.expecting = False
                if entry.ending:
                    self.release(event.key)

    def end(self, key: RequestKey, reason: str) -> None:
        """Stop whatever is done for a key; its blocks go back once no writer can touch them.

        reason: goes nowhere, a writer is told no more than that the reader gave up.
        """
        entry = self._live_entry(key)
        if entry is None:
            return
        if key in self._pending:
            self._pending.remove(key)
        if entry.expecting:
            self._quarantine(entry)
            self._receiver.cancel(key)
        else:
            self.release(key)

    def release(self, key: RequestKey) -> None:
        """Nothing outside touches the blocks any more: free all and say so."""
        entry = self._entries.pop(key)
        self._scheduler.remove(entry.request)
        self._blocks.release_quarantined(entry.quarantined)
        self._tiers.forget(key)
        self._steps.forget(key)
        self._replies.released(key)

    def transfers(self) -> list[worker_pb2.TransferPeerStats]:
        """Of the leader's own rank."""
        return self._receiver.stats()

    def _prefill_fetched(self, keys: Sequence[RequestKey]) -> None:
        """Local prefills that waited for the tiers start, from what was found."""
        for key in keys:
            request = self._entries[key].request
            # NOTE: in one go, so that nobody else gets the blocks that go back: it still fits.
            self._blocks.free(request)
            request.num_cached_tokens = self._blocks.attach_prefix(request, resumed=True)
            allocated = self._blocks.allocate(request, request.num_tokens)
            assert allocated, f"{key} held blocks for all its tokens"
            self._compute(request)

    def _take_in(self) -> None:
        self._prefill_fetched(self._tiers.overdue())
        self._admit_pending()
        self._replies.flush()

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

    def _offer(self, entry: Entry) -> None:
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

    def _start(self, entry: Entry) -> None:
        """Join the next decode step: the KV of all tokens but the newest is here."""
        request = entry.request
        request.num_computed_tokens = entry.num_remote_tokens
        self._blocks.register_computed(request)
        try:
            self._scheduler.add_running(request)
        except ValueError as error:
            self._replies.failed(request.key, worker_pb2.FAILURE_INVALID, str(error))
            self.end(request.key, str(error))

    def _compute(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except QueueFull as error:
            self._replies.failed(request.key, worker_pb2.FAILURE_OVERLOADED, str(error))
            self.end(request.key, str(error))

    def _on_arrived(self, entry: Entry) -> None:
        entry.expecting = False
        entry.arrived = True
        if entry.ending:
            self.release(entry.request.key)
        elif entry.request.state is RequestState.WAITING_FOR_REMOTE_KV:
            self._start(entry)

    def _on_failed(self, entry: Entry, event: KVFailed) -> None:
        key = entry.request.key
        entry.expecting = not event.quiet
        if not entry.ending:
            self._replies.failed(
                key,
                worker_pb2.FAILURE_TRANSFER,
                event.reason,
                is_counted=not event.withdrawn,
            )
            self._quarantine(entry)
        if event.quiet:
            self.release(key)

    def _live_entry(self, key: RequestKey) -> Entry | None:
        entry = self._entries.get(key)
        return None if entry is None or entry.ending else entry

    def _reserved_entry(self, key: RequestKey, *, may_have_arrived: bool = True) -> Entry | None:
        """The request that a proxy may say how to go on with; another one's message is counted.

        NOTE: one that is pending is not among them: its proxy has no Reserved yet, and it no block.
        """
        entry = self._live_entry(key)
        if (
            entry is None
            or entry.is_local
            or entry.request.state is not RequestState.RESERVED
            or not (entry.expecting or (entry.arrived and may_have_arrived))
        ):
            self._counters.num_stale_messages += 1
            return None
        return entry

    def _quarantine(self, entry: Entry) -> None:
        entry.ending = True
        request = entry.request
        if self._scheduler.get(request.key) is not None:
            # A local prefill: its blocks are its own, the writer's grant was taken back.
            self._scheduler.remove(request)
        else:
            entry.quarantined = self._blocks.quarantine(request)
