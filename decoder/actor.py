"""The decode worker: one process, one engine. Ray runs what `start` returns."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc

from decoder.graph import graph_forward
from decoder.loop import DecodeEvent, DecodeLoop
from engine.worker.assembly import build_engine
from engine.worker.config import WorkerConfig
from engine.worker.endpoint import Endpoint
from engine.worker.process import Start, WorkerProcess
from kvtransfer.connector import Receiver
from protos import worker_pb2, worker_pb2_grpc


def start(config_json: str) -> WorkerProcess:
    """Begin to load a `WorkerConfig` and to serve it; returns at once.

    Raises: ValueError: the text is not such a configuration.
    """
    return WorkerProcess(WorkerConfig.from_json(config_json), serve_decode)


@contextmanager
def serve_decode(start: Start) -> Iterator[DecodeLoop]:
    """A decode loop that is reachable at start.address while the context is open."""
    config = start.config
    with ExitStack() as stack:
        make_forward = graph_forward(config.graph_mode, start.report)
        engine = build_engine(
            start, worker_pb2.ROLE_DECODER, config.transfer.transport, make_forward
        )
        stack.callback(engine.close)
        endpoint: Endpoint[DecodeEvent] = Endpoint(start, engine)
        receiver = Receiver(
            engine.memory,
            engine_id=config.engine_id,
            incarnation=start.incarnation,
            config=config.transfer,
            token=config.cluster_token,
            on_event=endpoint.inbox.put,
        )
        stack.callback(receiver.close)

        def add_link(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_KVLinkServicer_to_server(receiver, server)

        endpoint.serve(add_link)
        yield DecodeLoop(
            engine=engine,
            intake=endpoint.intake,
            inbox=endpoint.inbox,
            receiver=receiver,
            link_address=start.address,
        )
