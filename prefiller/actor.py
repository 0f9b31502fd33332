"""The prefill worker: one process, one engine. Ray runs what `start` returns."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from engine.worker.assembly import build_engine
from engine.worker.config import WorkerConfig
from engine.worker.endpoint import Endpoint
from engine.worker.kv_ranks import EngineSender
from engine.worker.loop import EngineLoop, Pools
from engine.worker.pipeline import StepEnded
from engine.worker.process import Start, WorkerProcess
from engine.worker.ranks import Launcher
from kvtransfer.connector import Sender, TransferResult
from prefiller.loop import PrefillEvent, PrefillRole
from prefiller.pool import PrefillPool
from protos import worker_pb2


def start(config_json: str, launcher: Launcher | None = None) -> WorkerProcess:
    """Begin to load a `WorkerConfig` and to serve it; returns at once.

    launcher: of the engine's other ranks; None starts them on this machine.
    Raises: ValueError: the text is not such a configuration.
    """
    return WorkerProcess(WorkerConfig.from_json(config_json), serve_prefill, launcher)


@contextmanager
def serve_prefill(start: Start) -> Iterator[EngineLoop[TransferResult | StepEnded, PrefillPool]]:
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
            loop=start.server.loop,
            num_replicas=config.parallel.cp_size,
        )
        stack.callback(sender.close)
        endpoint: Endpoint[PrefillEvent] = Endpoint(start, engine)
        pools = Pools(
            [
                PrefillPool(
                    engine,
                    pool,
                    endpoint.intake.replies,
                    EngineSender(dp_rank, None if dp_rank else sender, engine.leading, config),
                    endpoint.inbox.put,
                )
                for dp_rank, pool in enumerate(engine.pools)
            ]
        )
        endpoint.serve()
        yield EngineLoop(
            engine=engine,
            intake=endpoint.intake,
            inbox=endpoint.inbox,
            pools=pools,
            role=PrefillRole(engine, endpoint.intake, endpoint.inbox, pools),
        )
