"""Workers and a controller that are real gRPC servers, with scripted tokens and faults."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import xxhash

from protos import worker_pb2, worker_pb2_grpc
from protos.block_hash import hash_blocks
from protos.step_message import step_message

TOKEN = "test-cluster-token"
BLOCK_SIZE = 32
Key = tuple[str, int]
# Plain English words of the packaged model's vocabulary, so that texts are easy to compare.
WORD_IDS = (905, 282, 253, 260, 284, 288, 327, 335, 338, 354, 419, 451, 523, 567, 623, 690)
TokenFunction = Callable[[Sequence[int], int, worker_pb2.SamplingParams], int]


def hashed_token(token_ids: Sequence[int], num_prompt: int, _: worker_pb2.SamplingParams) -> int:
    """A word that depends on every token before it: one lost or repeated token changes all."""
    data = ",".join(map(str, token_ids)).encode()
    return WORD_IDS[xxhash.xxh3_64_intdigest(data) % len(WORD_IDS)]


def scripted(output_ids: Sequence[int]) -> TokenFunction:
    """Emit these tokens whatever the prompt is."""

    def token(token_ids: Sequence[int], num_prompt: int, _: worker_pb2.SamplingParams) -> int:
        return output_ids[min(len(token_ids) - num_prompt, len(output_ids) - 1)]

    return token


@dataclass(slots=True)
class Behavior:
    """How a fake worker behaves; may be changed while it runs."""

    token: TokenFunction = hashed_token
    eos_id: int = 2
    reserve_delay_s: float = 0.0
    prefill_delay_s: float = 0.0
    transfer_delay_s: float = 0.0
    token_delay_s: float = 0.001
    die_at: str = ""
    """reserve | prefill | first_token | transfer | token:N"""
    fail_at: str = ""
    """Like die_at, but answers Failed(fail_code)."""
    fail_code: "worker_pb2.FailureCode.ValueType" = worker_pb2.FAILURE_INTERNAL
    num_failures: int = 10**9
    """How many times fail_at applies."""
    error_at: int = -1
    """Output index at which the request itself cannot go on, as a grammar may."""
    repeat_tokens: bool = False
    """Send the last token again with each new one."""


@dataclass(slots=True)
class Network:
    """What the fakes share: which KV has arrived."""

    arrived: dict[Key, asyncio.Event] = field(default_factory=dict)

    def arrival(self, key: Key) -> asyncio.Event:
        return self.arrived.setdefault(key, asyncio.Event())


@dataclass(slots=True, eq=False)
class _Held:
    work: worker_pb2.Work
    orders: "asyncio.Queue[worker_pb2.Activate | None]"
    task: "asyncio.Task[None] | None" = None


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """A prefiller or decoder that computes nothing."""

    def __init__(
        self,
        role: "worker_pb2.Role.ValueType",
        engine_id: str,
        network: Network,
        *,
        incarnation: int = 1,
        max_model_len: int = 8192,
    ) -> None:
        self.role = role
        self.engine_id = engine_id
        self.incarnation = incarnation
        self.network = network
        self.behavior = Behavior()
        self.max_model_len = max_model_len
        self.state = worker_pb2.WORKER_READY
        self.address = ""
        self.held: dict[Key, _Held] = {}
        self.received: list[str] = []
        self.cancelled: list[Key] = []
        self.renewed: set[Key] = set()
        self.works: list[worker_pb2.Work] = []
        self.num_decode_tokens = 0
        self.num_prefills = 0
        self.blocks: set[bytes] = set()
        self.stats_interval_s = 0.1
        self.forgets_releases = False
        self._server: grpc.aio.Server | None = None
        self._outs: set[asyncio.Queue[worker_pb2.WorkerMessage]] = set()
        self._dying: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    def die(self) -> None:
        """End like a killed process; returns at once."""
        task = asyncio.get_running_loop().create_task(self.stop())
        self._dying.add(task)

    async def restarted(self) -> "FakeWorker":
        """A new incarnation, started."""
        worker = FakeWorker(
            self.role, self.engine_id, self.network, incarnation=self.incarnation + 1
        )
        await worker.start()
        return worker

    def entry(self) -> worker_pb2.WorkerEntry:
        return worker_pb2.WorkerEntry(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            role=self.role,
            address=self.address,
            state=self.state,
        )

    async def GetStats(
        self, request: worker_pb2.GetStatsRequest, context: object
    ) -> worker_pb2.WorkerStats:
        return self._stats()

    async def Session(
        self,
        request_iterator: AsyncIterator[worker_pb2.ProxyMessage],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        if ("x-pdserve-token", TOKEN) not in tuple(context.invocation_metadata() or ()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong cluster token")
        out: asyncio.Queue[worker_pb2.WorkerMessage] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._read(request_iterator, out)),
            asyncio.create_task(self._report(out)),
        ]
        try:
            yield worker_pb2.WorkerMessage(
                hello=worker_pb2.WorkerHello(
                    engine_id=self.engine_id,
                    incarnation=self.incarnation,
                    role=self.role,
                    layout=worker_pb2.KVLayout(block_size=BLOCK_SIZE),
                    num_blocks=1000,
                    max_model_len=self.max_model_len,
                )
            )
            while True:
                yield await out.get()
        finally:
            for task in tasks:
                task.cancel()
            for held in list(self.held.values()):
                if held.task is not None:
                    held.task.cancel()
            self.held.clear()

    async def _report(self, out: "asyncio.Queue[worker_pb2.WorkerMessage]") -> None:
        while True:
            out.put_nowait(worker_pb2.WorkerMessage(stats=self._stats()))
            await asyncio.sleep(self.stats_interval_s)

    def _stats(self) -> worker_pb2.WorkerStats:
        return worker_pb2.WorkerStats(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            role=self.role,
            num_running=len(self.held),
            num_blocks=1000,
            num_held_blocks=len(self.held),
            num_leases=len(self.held),
            transfers=[worker_pb2.TransferPeerStats(peer_engine_id="peer", num_blocks=7)],
        )

    async def _read(
        self,
        messages: AsyncIterator[worker_pb2.ProxyMessage],
        out: "asyncio.Queue[worker_pb2.WorkerMessage]",
    ) -> None:
        async for message in messages:
            kind = message.WhichOneof("message")
            if kind == "resync_kv":
                continue
            self.received.append(str(kind))
            if kind == "renew":
                self.renewed = {(key.request_id, key.attempt) for key in message.renew.keys}
                continue
            inner = getattr(message, str(kind))
            key = (inner.key.request_id, inner.key.attempt)
            if kind in ("reserve", "prefill"):
                self.works.append(inner.work)
                if len(inner.work.token_ids) >= self.max_model_len:
                    self._refuse(inner.key, out)
                    continue
                held = _Held(inner.work, asyncio.Queue())
                self.held[key] = held
                run = self._decode if kind == "reserve" else self._prefill
                held.task = asyncio.create_task(run(key, held, out))
            elif kind == "cancel":
                self.cancelled.append(key)
                if key in self.held:
                    held = self.held[key]
                    assert held.task is not None
                    held.task.cancel()
                    self._release(key, out)
            elif key in self.held:
                self.held[key].orders.put_nowait(message.activate if kind == "activate" else None)

    def _refuse(
        self, key: worker_pb2.RequestKey, out: "asyncio.Queue[worker_pb2.WorkerMessage]"
    ) -> None:
        code, message = worker_pb2.FAILURE_INVALID, f"max_model_len is {self.max_model_len}"
        failed = worker_pb2.Failed(key=key, code=code, message=message)
        out.put_nowait(worker_pb2.WorkerMessage(failed=failed))
        out.put_nowait(worker_pb2.WorkerMessage(released=worker_pb2.Released(key=key)))

    def _release(self, key: Key, out: "asyncio.Queue[worker_pb2.WorkerMessage]") -> None:
        if self.held.pop(key, None) is not None and not self.forgets_releases:
            out.put_nowait(worker_pb2.WorkerMessage(released=worker_pb2.Released(key=_proto(key))))

    async def _fault(
        self, where: str, key: Key, out: "asyncio.Queue[worker_pb2.WorkerMessage]"
    ) -> bool:
        """Apply a fault planned for this point; True when the request is over."""
        behavior = self.behavior
        if behavior.die_at == where:
            self.die()
            await asyncio.sleep(60)
        if behavior.fail_at == where and behavior.num_failures > 0:
            behavior.num_failures -= 1
            failed = worker_pb2.Failed(key=_proto(key), code=behavior.fail_code, message="fault")
            out.put_nowait(worker_pb2.WorkerMessage(failed=failed))
            self._release(key, out)
            return True
        return False

    async def _decode(
        self, key: Key, held: _Held, out: "asyncio.Queue[worker_pb2.WorkerMessage]"
    ) -> None:
        await asyncio.sleep(self.behavior.reserve_delay_s)
        if await self._fault("reserve", key, out):
            return
        num_cached = self._num_cached(held.work.token_ids)
        first_block = num_cached // BLOCK_SIZE
        num_blocks = -(-len(held.work.token_ids) // BLOCK_SIZE)
        target = worker_pb2.KVTarget(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            first_block=first_block,
            block_ids=range(first_block, num_blocks),
        )
        out.put_nowait(
            worker_pb2.WorkerMessage(
                reserved=worker_pb2.Reserved(
                    key=_proto(key), num_cached_tokens=num_cached, target=target
                )
            )
        )
        order = await held.orders.get()
        token_ids = list(held.work.token_ids)
        if order is None:
            await asyncio.sleep(self.behavior.prefill_delay_s)
            if await self._fault("prefill", key, out):
                return
            self.num_prefills += 1
        else:
            await self.network.arrival(key).wait()
            if await self._fault("transfer", key, out):
                return
            token_ids += order.token_ids
            num_cached = 0
        self._remember(held.work.token_ids)
        while True:
            if await self._fault(f"token:{len(token_ids) - held.work.num_prompt_tokens}", key, out):
                return
            output = self._next_token(key, held.work, token_ids, num_cached)
            self.num_decode_tokens += 1
            _send(out, output)
            if output.finish_reason != worker_pb2.FINISH_NONE:
                break
            await asyncio.sleep(self.behavior.token_delay_s)
        self._release(key, out)

    async def _prefill(
        self, key: Key, held: _Held, out: "asyncio.Queue[worker_pb2.WorkerMessage]"
    ) -> None:
        await asyncio.sleep(self.behavior.prefill_delay_s)
        if await self._fault("prefill", key, out):
            return
        self.num_prefills += 1
        num_cached = self._num_cached(held.work.token_ids)
        self._remember(held.work.token_ids)
        output = self._next_token(key, held.work, list(held.work.token_ids), num_cached)
        _send(out, output)
        await asyncio.sleep(self.behavior.transfer_delay_s)
        if await self._fault("first_token", key, out):
            return
        self.network.arrival(key).set()
        self._release(key, out)

    def _num_cached(self, token_ids: Sequence[int]) -> int:
        num_cached = 0
        for block in hash_blocks(list(token_ids[:-1]), BLOCK_SIZE, ""):
            if block not in self.blocks:
                break
            num_cached += BLOCK_SIZE
        return num_cached

    def _remember(self, token_ids: Sequence[int]) -> None:
        self.blocks.update(hash_blocks(list(token_ids), BLOCK_SIZE, ""))

    def _next_token(
        self, key: Key, work: worker_pb2.Work, token_ids: list[int], num_cached: int
    ) -> worker_pb2.TokenOutput:
        """Sample one token and append it to `token_ids`."""
        sampling = work.sampling
        index = len(token_ids) - work.num_prompt_tokens
        token = self.behavior.token(token_ids, work.num_prompt_tokens, sampling)
        is_first = len(token_ids) == len(work.token_ids)
        if index == self.behavior.error_at:
            return worker_pb2.TokenOutput(
                key=_proto(key), error="grammar: fault", finish_reason=worker_pb2.FINISH_STOP
            )
        token_ids.append(token)
        finish = worker_pb2.FINISH_NONE
        if token in sampling.stop_token_ids or (
            token == self.behavior.eos_id and not sampling.ignore_eos
        ):
            finish = worker_pb2.FINISH_STOP
        elif index + 1 >= sampling.max_tokens:
            finish = worker_pb2.FINISH_LENGTH
        output = worker_pb2.TokenOutput(
            key=_proto(key), output_index=index, token_ids=[token], finish_reason=finish
        )
        if self.behavior.repeat_tokens and index > 0:
            output = worker_pb2.TokenOutput(
                key=_proto(key),
                output_index=index - 1,
                token_ids=token_ids[-2:],
                finish_reason=finish,
            )
        if is_first:
            output.num_cached_tokens = num_cached
        if sampling.HasField("num_logprobs"):
            output.logprobs.extend(_entry(token) for token in output.token_ids)
            output.top_logprobs.extend(
                worker_pb2.LogprobList(
                    logprobs=[_entry(token + i) for i in range(sampling.num_logprobs)]
                )
                for token in output.token_ids
            )
        if is_first and sampling.HasField("num_prompt_logprobs"):
            output.prompt_logprobs.extend(
                worker_pb2.LogprobList(
                    logprobs=[
                        _entry(prompt_id),
                        *(_entry(prompt_id + i) for i in range(sampling.num_prompt_logprobs)),
                    ]
                )
                for prompt_id in work.token_ids[1 : work.num_prompt_tokens]
            )
        return output


def _entry(token_id: int) -> worker_pb2.TokenLogprob:
    return worker_pb2.TokenLogprob(token_id=token_id, logprob=-(token_id % 8) / 8)


def _proto(key: Key) -> worker_pb2.RequestKey:
    return worker_pb2.RequestKey(request_id=key[0], attempt=key[1])


def _send(out: "asyncio.Queue[worker_pb2.WorkerMessage]", output: worker_pb2.TokenOutput) -> None:
    out.put_nowait(worker_pb2.WorkerMessage(step=step_message([output])))


class FakeController(worker_pb2_grpc.ControllerServicer):
    """Serves the membership of a list of workers."""

    def __init__(self) -> None:
        self.workers: list[FakeWorker] = []
        self.generation = 1
        self.address = ""
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        worker_pb2_grpc.add_ControllerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    def publish(self) -> None:
        self.generation += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[worker_pb2.Membership]:
        if ("x-pdserve-token", TOKEN) not in tuple(context.invocation_metadata() or ()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong cluster token")
        while True:
            changed = self._changed
            yield worker_pb2.Membership(
                generation=self.generation,
                workers=[worker.entry() for worker in self.workers],
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await changed.wait()

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: object
    ) -> worker_pb2.ServiceStatus:
        return worker_pb2.ServiceStatus()

    async def Scale(
        self, request: worker_pb2.ScaleRequest, context: object
    ) -> worker_pb2.ServiceStatus:
        return worker_pb2.ServiceStatus()
