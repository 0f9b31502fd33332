"""Where proxies reach an engine loop: sessions put events into its inbox and take its answers."""

from collections.abc import Callable
from typing import Generic, TypeVar

import grpc

from engine.worker.assembly import Engine
from engine.worker.inbox import Inbox
from engine.worker.intake import Intake
from engine.worker.leases import Leases
from engine.worker.process import Start
from engine.worker.replies import Replies
from engine.worker.session import Outbox, SessionService
from protos import worker_pb2_grpc

EventT = TypeVar("EventT")


class Endpoint(Generic[EventT]):
    """The inbox and the intake of one loop; EventT is all that its inbox may hold."""

    def __init__(self, start: Start, engine: Engine) -> None:
        self.inbox: Inbox[EventT] = Inbox()
        self._start = start
        self._engine = engine
        self._outbox = Outbox(start.server.loop)
        leases = Leases(start.config.lease_s)
        self.intake = Intake(engine, leases, Replies(leases, self._outbox, engine.counters))

    def serve(self, add_services: Callable[[grpc.aio.Server], None] | None = None) -> None:
        """Answer on the worker's address; `add_services` adds what a role serves besides."""
        service = SessionService(
            inbox=self.inbox,
            outbox=self._outbox,
            hello=self._engine.hello,
            token=self._start.config.cluster_token,
        )

        def add_all(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
            if add_services is not None:
                add_services(server)

        self._start.server.start(add_all)
