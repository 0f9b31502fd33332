"""The decode worker as Ray runs it: one process, one engine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc

from decoder.loop import DecodeEvent, DecodeLoop
from engine.worker.assembly import build_engine
from engine.worker.config import WorkerConfig
from engine.worker.inbox import Inbox
from engine.worker.leases import Leases
from engine.worker.process import Info, Start, WorkerProcess
from engine.worker.replies import Replies
from engine.worker.session import Outbox, SessionService
from kvtransfer.connector import Receiver
from protos import worker_pb2, worker_pb2_grpc


class DecoderActor:
    """Wrapped by the controller with ray.remote; every method returns quickly."""

    def __init__(self, config_json: str) -> None:
        self._process = WorkerProcess(WorkerConfig.from_json(config_json), serve_decode)

    def info(self) -> Info:
        """engine_id, incarnation, address, state, phase, progress, error and pid."""
        return self._process.info()

    def stop(self) -> None:
        """End the loop and the server."""
        self._process.stop()


@contextmanager
def serve_decode(start: Start) -> Iterator[DecodeLoop]:
    """A decode loop that is reachable at start.address while the context is open."""
    config = start.config
    with ExitStack() as stack:
        engine = build_engine(start, worker_pb2.ROLE_DECODER, config.transfer.transport)
        stack.callback(engine.close)
        inbox: Inbox[DecodeEvent] = Inbox()
        receiver = Receiver(
            engine.memory,
            engine_id=config.engine_id,
            incarnation=start.incarnation,
            config=config.transfer,
            token=config.cluster_token,
            on_event=inbox.put,
        )
        stack.callback(receiver.close)
        outbox = Outbox(start.server.loop)
        leases = Leases(config.lease_s)
        service = SessionService(
            inbox=inbox, outbox=outbox, hello=engine.hello, token=config.cluster_token
        )

        def add_services(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
            worker_pb2_grpc.add_KVLinkServicer_to_server(receiver, server)

        start.server.start(add_services)
        yield DecodeLoop(
            hello=engine.hello,
            link_address=start.address,
            scheduler=engine.scheduler,
            blocks=engine.blocks,
            steps=engine.steps,
            counters=engine.counters,
            receiver=receiver,
            inbox=inbox,
            leases=leases,
            replies=Replies(leases, outbox, engine.counters),
        )
