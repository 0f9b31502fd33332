"""The requests of one data-parallel rank of a prefiller, and their transfers.

    WAITING --> RUNNING (chunks; each layer pushed as it is written) --first token sampled-->
      SENDING --all written--> Released
    any --Cancel, lease, deadline, session closed--> ending --nothing in flight--> Released

Blocks are freed only when the transfer says that it will never read them again. Owned by the loop's
thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.prefix_tiers import TierEvent
from engine.request import Request, RequestKey
from engine.scheduler import QueueFull
from engine.scheduler_output import ScheduledRequest
from engine.worker.assembly import Engine, Pool
from engine.worker.balance import Load
from engine.worker.kv_ranks import EngineSender, EngineTransfer
from engine.worker.replies import Replies
from kvtransfer.connector import BlockCopy, TransferResult
from protos import worker_pb2


@dataclass(slots=True, eq=False)
class Entry:
    """A request and its transfer."""

    request: Request
    target: worker_pb2.KVTarget
    transfer: EngineTransfer | None = None
    """Set at the first chunk; None again once it is quiet."""
    next_block: int = 0
    """First block of the prompt that was not pushed yet."""
    ending: bool = False


class PrefillPool:
    """See the module's docstring."""

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        replies: Replies,
        sender: EngineSender,
        on_transfer_result: Callable[[TransferResult], None],
    ) -> None:
        """on_transfer_result: takes a result on any thread; `conclude` it on the loop's."""
        self.scheduler = pool.scheduler
        self._blocks = pool.blocks
        self._steps = engine.steps
        self._tiers = pool.tiers
        self._replies = replies
        self._sender = sender
        self._on_transfer_result = on_transfer_result
        self._entries: dict[RequestKey, Entry] = {}

    @property
    def entries(self) -> Mapping[RequestKey, Entry]:
        """Everything that is not released."""
        return self._entries

    def load_with(self, request: Request) -> Load:
        """How busy it would be with one more request."""
        blocks, config = self._blocks, self.scheduler.config
        num_cached = blocks.num_matched(request)
        num_new_tokens = request.num_tokens - num_cached * blocks.block_size
        return Load(
            num_requests=len(self._entries) + 1,
            max_num_requests=config.max_num_seqs,
            num_tokens=self.scheduler.num_pending_tokens + num_new_tokens,
            max_num_tokens=config.max_num_batched_tokens,
            num_blocks=blocks.num_held_blocks + blocks.num_blocks_for(num_new_tokens),
            max_num_blocks=blocks.num_blocks,
        )

    def accept(self, request: Request, target: worker_pb2.KVTarget) -> None:
        """Take a new request; it is scheduled once the tiers have said what they have of it.

        Raises: ValueError: it can never run here. QueueFull: too many wait.
        """
        self.scheduler.limits.validate(request)
        if not self._tiers.lookup(request):
            self.scheduler.add(request)
        self._entries[request.key] = Entry(request, target)

    def take_fetched(self, event: TierEvent) -> None:
        """The tiers have done something for this pool."""
        self._schedule(self._tiers.on_tier_event(event))

    def schedule(self) -> list[ScheduledRequest]:
        """What the next step computes."""
        self._schedule(self._tiers.overdue())
        return self.scheduler.schedule().scheduled

    def pusher(self, scheduled: list[ScheduledRequest]) -> Callable[[int], None]:
        """Begin the transfers of what the next step computes; call the result once per layer."""
        return self._sender.pusher([self._next_push(entry) for entry in scheduled])

    def finish_transfer(self, request: Request) -> None:
        """The request's prompt is computed and its first token known."""
        transfer = self._entries[request.key].transfer
        if transfer is None:
            return  # it failed during this step; the event that says so is in the inbox
        if request.finish_reason is None:
            transfer.finish()
        else:
            transfer.withdraw("the first token ended the request")

    def conclude(self, result: TransferResult) -> None:
        """The transfer of a request is over."""
        entry = self._entries[result.key]
        entry.transfer = None
        if not result.ok and not entry.ending and entry.request.finish_reason is None:
            self._replies.failed(result.key, worker_pb2.FAILURE_TRANSFER, result.error)
        self._release(entry)

    def end(self, key: RequestKey, reason: str) -> None:
        """Stop whatever is done for a key; its blocks go back once the transfer is quiet."""
        entry = self._entries[key]
        if entry.ending:
            return
        entry.ending = True
        if entry.transfer is None:
            self._release(entry)
            return
        self._leave_scheduler(entry.request)
        entry.transfer.withdraw(reason)

    def transfers(self) -> list[worker_pb2.TransferPeerStats]:
        """Of the leader's own rank."""
        return self._sender.stats()

    def _next_push(self, scheduled: ScheduledRequest) -> tuple[EngineTransfer, list[BlockCopy]]:
        """The blocks that this step completes, or leaves half full; same for every layer."""
        request = scheduled.request
        entry = self._entries[request.key]
        if entry.transfer is None:
            entry.transfer = self._sender.begin(request.key, entry.target, self._on_transfer_result)
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

    def _schedule(self, keys: Sequence[RequestKey]) -> None:
        """Requests that waited for the tiers join the queue."""
        for key in keys:
            try:
                self.scheduler.add(self._entries[key].request)
            except QueueFull as error:
                self._replies.failed(key, worker_pb2.FAILURE_OVERLOADED, str(error))
                self.end(key, str(error))

    def _leave_scheduler(self, request: Request) -> None:
        # NOTE: the scheduler frees the blocks of what it removes, but these may still be read.
        block_ids, request.block_ids = request.block_ids, []
        self.scheduler.remove(request)
        request.block_ids = block_ids

    def _release(self, entry: Entry) -> None:
        request = entry.request
        self.scheduler.remove(request)
        self._tiers.forget(request.key)
        del self._entries[request.key]
        self._steps.forget(request.key)
        self._replies.released(request.key)
