"""The decode worker: one process, one engine. Ray runs what `start` returns."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc

from decoder.graph import graph_forward
from decoder.loop import DecodeEvent, DecodeRole
from decoder.pool import DecodePool
from engine.worker.assembly import build_engine
from engine.worker.config import WorkerConfig
from engine.worker.endpoint import Endpoint
from engine.worker.kv_ranks import EngineReceiver
from engine.worker.loop import EngineLoop, Pools
from engine.worker.process import Start, WorkerProcess
from engine.worker.ranks import Launcher
from kvtransfer.connector import ReceiveEvent, Receiver
from protos import worker_pb2, worker_pb2_grpc


def start(config_json: str, launcher: Launcher | None = None) -> WorkerProcess:
    """Begin to load a `WorkerConfig` and to serve it; returns at once.

    launcher: of the engine's other ranks; None starts them on this machine.
    Raises: ValueError: the text is not such a configuration.
    """
    return WorkerProcess(WorkerConfig.from_json(config_json), serve_decode, launcher)


@contextmanager
def serve_decode(start: Start) -> Iterator[EngineLoop[ReceiveEvent, DecodePool]]:
    """A decode loop that is reachable at start.address while the context is open."""
    config = start.config
    with ExitStack() as stack:
        engine = build_engine(
            start,
            worker_pb2.ROLE_DECODER,
            config.transfer.transport,
            graph_forward(config, start.report),
            follower="decoder.follower",
        )
        stack.callback(engine.close)
        endpoint: Endpoint[DecodeEvent] = Endpoint(start, engine)
        parallel = config.parallel
        receivers = [
            EngineReceiver(dp_rank, engine.leading, parallel, endpoint.inbox.put)
            for dp_rank in range(parallel.dp_size)
        ]
        own = Receiver(
            engine.memory,
            engine_id=config.engine_id,
            incarnation=start.incarnation,
            config=config.transfer,
            token=config.cluster_token,
            on_event=receivers[0].on_own_event,
        )
        stack.callback(own.close)
        receivers[0].lead(own)

        def add_link(server: grpc.aio.Server) -> None:
            worker_pb2_grpc.add_KVLinkServicer_to_server(own, server)

        addresses = [start.address]
        if engine.leading is not None:
            addresses += engine.leading.follower_addresses
        pools = Pools(
            [
                DecodePool(
                    engine,
                    pool,
                    endpoint.intake.replies,
                    receiver,
                    addresses[dp_rank * parallel.tp_size : (dp_rank + 1) * parallel.tp_size],
                )
                for dp_rank, (pool, receiver) in enumerate(
                    zip(engine.pools, receivers, strict=True)
                )
            ]
        )
        endpoint.serve(add_link)
        yield EngineLoop(
            engine=engine,
            intake=endpoint.intake,
            inbox=endpoint.inbox,
            pools=pools,
            role=DecodeRole(engine, endpoint.intake, pools),
        )
