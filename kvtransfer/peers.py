"""The other end of a link, as each end keeps it: who it is, what was counted, when to try again."""

from dataclasses import dataclass

from kvtransfer.errors import TransferError
from kvtransfer.layout import KVLayout
from kvtransfer.registration import RegisteredRegion
from kvtransfer.reshard import Resharding
from protos import worker_pb2


@dataclass(frozen=True, slots=True)
class PeerKey:
    """One rank of one run of one reader."""

    engine_id: str
    incarnation: int
    tp_rank: int
    address: str

    def check_hello(
        self, hello: worker_pb2.ReaderHello, own: KVLayout
    ) -> tuple[tuple[RegisteredRegion, ...], Resharding]:
        """Where a writer with the layout `own` may write in this reader, and how.

        Raises: TransferError: another reader answers, or its cache does not go with the writer's.
        """
        if (hello.engine_id, hello.incarnation) != (self.engine_id, self.incarnation):
            raise TransferError(
                f"{self.address} is {hello.engine_id}/{hello.incarnation}, the blocks were "
                f"reserved by {self.engine_id}/{self.incarnation}"
            )
        regions = tuple(RegisteredRegion.from_proto(r) for r in hello.endpoint.regions)
        layouts = [KVLayout.from_proto(message) for message in hello.layouts]
        ranks = [layout.tp_rank for layout in layouts]
        num_regions = own.num_model_layers * len(own.parts)
        if ranks != [self.tp_rank] or len(regions) != num_regions:
            raise TransferError(
                f"{self.address} is rank {ranks} with {len(regions)} regions, not rank "
                f"{self.tp_rank} with {num_regions}"
            )
        try:
            return regions, Resharding.between(own, layouts[0])
        except ValueError as error:
            raise TransferError(str(error)) from error


@dataclass(slots=True)
class PeerCounters:
    """Of one rank of a peer, over all links to it."""

    transport: str = ""
    num_transfers: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_failures: int = 0
    busy_s: float = 0.0
    """Of a writer: time that it has spent writing."""

    def to_proto(self, engine_id: str) -> worker_pb2.TransferPeerStats:
        """The same on the wire."""
        return worker_pb2.TransferPeerStats(
            peer_engine_id=engine_id,
            transport=self.transport,
            num_transfers=self.num_transfers,
            num_blocks=self.num_blocks,
            num_bytes=self.num_bytes,
            num_failures=self.num_failures,
            busy_s=self.busy_s,
        )


@dataclass(slots=True)
class Backoff:
    """Probation of one reader: when it may be tried again."""

    num_failures: int = 0
    not_before_s: float = 0.0
