"""The decode worker: one process, one engine. Ray runs what `start` returns."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc

from decoder.graph import graph_forward
from decoder.loop import DecodeEvent, DecodeLoop
from engine.worker.assembly import build_engine
from engine.worker.config import WorkerConfig
from engine.worker.endpoint import Endpoint
from engine.worker.kv_ranks import EngineReceiver
from engine.worker.process import Start, WorkerProcess
from engine.worker.ranks import Launcher
from kvtransfer.connector import Receiver
from protos import worker_pb2, worker_pb2_grpc


def start(config_json: str, launcher: Launcher | None = None) -> WorkerProcess:
    """Begin to load a `WorkerConfig` and to serve it; returns at once.

    launcher: of the engine's other ranks; None starts them on this machine.
    Raises: ValueError: the text is not such a configuration.
    """
    return WorkerProcess(WorkerConfig.from_json(config_json), serve_decode, launcher)


@contextmanager
def serve_decode(start: Start) -> Iterator[DecodeLoop]:
    """A decode loop that is reachable at start.address while the context is open."""
    config = start.config
    with ExitStack() as stack:
        make_forward = graph_forward(
            config.graph_mode, start.report, multiple_of=config.parallel.tp_size
        )
        engine = build_engine(
            start, worker_pb2.ROLE_DECODER, config.transfer.transport, make_forward
        )
        stack.callback(engine.close)
        endpoint: Endpoint[DecodeEvent] = Endpoint(start, engine)
        receivers = EngineReceiver(engine.leading, endpoint.inbox.put)
        own = Receiver(
            engine.memory,
            engine_id=config.engine_id,
            incarnation=start.incarnation,
            config=config.transfer,
            token=config.cluster_token,
            on_event=receivers.on_own_event,
        )
        stack.callback(own.close)
        receivers.lead(own)

        def add_link(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_KVLinkServicer_to_server(own, server)

        endpoint.serve(add_link)
        yield DecodeLoop(
            engine=engine,
            intake=endpoint.intake,
            inbox=endpoint.inbox,
            receiver=receivers,
            rank_addresses=[start.address, *receivers.follower_addresses],
        )
