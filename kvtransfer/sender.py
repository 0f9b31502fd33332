"""The writer's side of KV transfer: one per prefiller process (one rank), one link per rank of a
reader.
"""

import asyncio
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvtransfer.config import KVTransferConfig
from kvtransfer.link import BlockCopy, RequestKey, TransferResult
from kvtransfer.peers import Backoff, PeerCounters, PeerKey
from kvtransfer.rank_transfer import RankTransfer
from kvtransfer.reader_stream import StreamLoop
from kvtransfer.registration import KVMemory
from kvtransfer.reshard import Placement, Resharding
from kvtransfer.transfer import Transfer
from kvtransfer.transports.loading import LoadedTransports, load_transports
from kvtransfer.writer_link import WriterIdentity, WriterLink
from protos import worker_pb2

BACKOFF_MEMORY_S = 60.0
JOIN_TIMEOUT_S = 5.0


class Sender:
    """Writes blocks of `memory` into blocks that readers reserved. Thread-safe."""

    def __init__(
        self,
        memory: KVMemory,
        *,
        engine_id: str,
        incarnation: int,
        config: KVTransferConfig,
        token: str,
        transports: LoadedTransports | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        replica: int = 0,
        num_replicas: int = 1,
    ):
        """Load the transports of the config, unless given, and register `memory` with them.

        loop: that of a gRPC server of this process; it outlives the sender. None: one of its own.
        replica: of num_replicas writers with the same layout and KV, each of which is told of every
        transfer; for each request and rank of a reader, one of them writes.

        Raises: TransportUnavailable: none can be loaded; says why for each.
        """
        self._config = config
        self._memory = memory
        self._transports = transports or load_transports(config, memory)
        self._writer = WriterIdentity(
            engine_id=engine_id,
            incarnation=incarnation,
            token=token,
            memory=memory,
            transports=self._transports,
            config=config,
            loop=StreamLoop(loop),
        )
        self._replica, self._num_replicas = replica, num_replicas
        self._lock = threading.Lock()
        self._links: dict[PeerKey, WriterLink] = {}
        self._backoffs: dict[PeerKey, Backoff] = {}
        self._stats: dict[tuple[str, int], PeerCounters] = {}
        self._active: set[RequestKey] = set()
        self._num_stale = 0
        self._is_closed = False

    def begin(
        self,
        key: RequestKey,
        target: worker_pb2.KVTarget,
        on_done: Callable[[TransferResult], None],
    ) -> Transfer:
        """Open or reuse the links to those ranks of the target that this rank writes, and ask each
        for a grant; return at once.

        on_done is called exactly once, when neither source nor target will be touched again because
        of this transfer: from the thread of a link, at the latest progress_timeout_s after the last
        progress; where this rank has nothing to write, from finish or abort. It must be cheap and
        must not raise. Where the transport cannot take back what it was given (Mooncake, when the
        reader hangs), source blocks may still be read after a failure; the reader's blocks stay in
        quarantine until that is over.
        A target with a number of ranks that the model cannot be split over is a failed transfer.
        Raises: ValueError: a transfer with this key is under way. RuntimeError: the sender was
        closed.
        """
        layout = self._memory.layout
        block_size = target.block_size or layout.block_size
        placement = Placement.of(
            target.block_ids,
            target.first_block,
            target.num_tokens,
            block_size=block_size,
            source_block_size=layout.block_size,
        )
        with self._lock:
            if key in self._active:
                raise ValueError(f"{key} is being transferred already")
            self._active.add(key)

        def conclude(result: TransferResult) -> None:
            with self._lock:
                self._active.discard(key)
            on_done(result)

        try:
            peers = [p for p in self._peers(target, block_size) if self._writes(key, p[0])]
        except ValueError as error:
            transfer = Transfer(key, layout.num_layers, range(0), conclude, self._memory.mark)
            transfer.abort(str(error))
            return transfer
        indices = peers[0][1].source_blocks(placement) if peers else range(0)
        transfer = Transfer(key, layout.num_layers, indices, conclude, self._memory.mark)
        parts = [
            RankTransfer(
                key,
                placement,
                indices,
                layout,
                self._config,
                transfer.on_part_done,
                partial(self._wake, peer),
            )
            for peer, _ in peers
        ]
        transfer.start(parts)
        for (peer, _), part in zip(peers, parts, strict=True):
            while not self._link(peer).add(part):
                pass
        return transfer

    def pusher(
        self, pushes: Sequence[tuple[Transfer, Sequence[BlockCopy]]]
    ) -> Callable[[int], None]:
        """What pushes one layer's blocks of all the transfers of a step; see Transfer.push.

        The device is asked once a layer how far it is, whatever the number of transfers.
        """
        pushes = [(transfer, copies) for transfer, copies in pushes if copies]

        def push_layer(layer_idx: int) -> None:
            if pushes:
                wait_computed = self._memory.mark()
                for transfer, copies in pushes:
                    transfer.push(layer_idx, copies, wait_computed)

        return push_layer

    def connect(self, target: worker_pb2.KVTarget) -> None:
        """Open the links to a reader ahead of the first transfer; return at once."""
        block_size = target.block_size or self._memory.layout.block_size
        for peer, _ in self._peers(target, block_size):
            self._link(peer)

    def close(self) -> None:
        """Fail what is under way and end all threads.

        Idempotent; blocks for at most a few seconds.
        """
        with self._lock:
            self._is_closed = True
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.close()
        for link in links:
            link.join(JOIN_TIMEOUT_S)
        self._writer.loop.close(JOIN_TIMEOUT_S)
        self._transports.close()

    def stats(self) -> list[worker_pb2.TransferPeerStats]:
        """Counters per rank of each reader since the start."""
        with self._lock:
            return [stats.to_proto(engine_id) for (engine_id, _), stats in self._stats.items()]

    @property
    def num_stale(self) -> int:
        """Messages of readers about transfers that were over."""
        with self._lock:
            return self._num_stale + sum(link.num_stale for link in self._links.values())

    @property
    def transport_names(self) -> list[str]:
        """What is loaded here, best first."""
        return self._transports.names

    def _peers(
        self, target: worker_pb2.KVTarget, block_size: int
    ) -> list[tuple[PeerKey, Resharding]]:
        """The ranks of the target that this rank has to write."""
        layout = self._memory.layout
        addresses = list(target.rank_addresses) or [target.link_address]
        peers = []
        for rank, address in enumerate(addresses):
            theirs = replace(layout.for_rank(rank, len(addresses)), block_size=block_size)
            resharding = Resharding.between(layout, theirs)
            if resharding.num_heads:
                peers.append(
                    (PeerKey(target.engine_id, target.incarnation, rank, address), resharding)
                )
        return peers

    def _writes(self, key: RequestKey, peer: PeerKey) -> bool:
        """Whether this replica does: in turn by rank, and spread over requests."""
        first = zlib.crc32(key[0].encode())
        return (first + peer.tp_rank) % self._num_replicas == self._replica

    def _wake(self, peer: PeerKey) -> None:
        with self._lock:
            link = self._links.get(peer)
        if link is not None:
            link.wake()

    def _link(self, peer: PeerKey) -> WriterLink:
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the sender was closed")
            for key in [key for key, link in self._links.items() if link.is_broken]:
                self._num_stale += self._links.pop(key).num_stale
            link = self._links.get(peer)
            if link is None:
                self._forget_old_backoffs()
                link = self._links[peer] = WriterLink(
                    peer,
                    self._writer,
                    self._stats.setdefault((peer.engine_id, peer.tp_rank), PeerCounters()),
                    self._backoffs.setdefault(peer, Backoff()),
                )
            return link

    def _forget_old_backoffs(self) -> None:
        oldest_s = time.monotonic() - BACKOFF_MEMORY_S
        for key, backoff in list(self._backoffs.items()):
            if backoff.num_failures and backoff.not_before_s < oldest_s:
                del self._backoffs[key]
