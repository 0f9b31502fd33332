"""The prefill worker as Ray runs it: one process, one engine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc

from engine.worker.assembly import build_engine
from engine.worker.config import WorkerConfig
from engine.worker.inbox import Inbox
from engine.worker.leases import Leases
from engine.worker.process import Info, Start, WorkerProcess
from engine.worker.replies import Replies
from engine.worker.session import Outbox, SessionService
from kvtransfer.connector import Sender
from prefiller.loop import PrefillEvent, PrefillLoop
from protos import worker_pb2, worker_pb2_grpc


class PrefillerActor:
    """Wrapped by the controller with ray.remote; every method returns quickly."""

    def __init__(self, config_json: str) -> None:
        self._process = WorkerProcess(WorkerConfig.from_json(config_json), serve_prefill)

    def info(self) -> Info:
        """engine_id, incarnation, address, state, phase, progress, error and pid."""
        return self._process.info()

    def stop(self) -> None:
        """End the loop and the server."""
        self._process.stop()


@contextmanager
def serve_prefill(start: Start) -> Iterator[PrefillLoop]:
    """A prefill loop that is reachable at start.address while the context is open."""
    config = start.config
    with ExitStack() as stack:
        engine = build_engine(start, worker_pb2.ROLE_PREFILLER, config.transfer.transport)
        stack.callback(engine.close)
        sender = Sender(
            engine.memory,
            engine_id=config.engine_id,
            incarnation=start.incarnation,
            config=config.transfer,
            token=config.cluster_token,
        )
        stack.callback(sender.close)
        inbox: Inbox[PrefillEvent] = Inbox()
        outbox = Outbox(start.server.loop)
        leases = Leases(config.lease_s)
        service = SessionService(
            inbox=inbox, outbox=outbox, hello=engine.hello, token=config.cluster_token
        )

        def add_services(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_WorkerServicer_to_server(service, server)

        start.server.start(add_services)
        yield PrefillLoop(
            hello=engine.hello,
            scheduler=engine.scheduler,
            blocks=engine.blocks,
            steps=engine.steps,
            counters=engine.counters,
            sender=sender,
            inbox=inbox,
            leases=leases,
            replies=Replies(leases, outbox, engine.counters),
        )
