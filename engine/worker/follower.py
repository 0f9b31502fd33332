"""A rank that is not the leader: it holds its part of the model and of the KV cache, and carries
out what the leader commands. Ends with its connection to the leader.

Started by a Launcher, with [rank, address of the leader, cluster token] as JSON on stdin.
"""

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import grpc
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.batch import Batch
from engine.parallel import join, leave
from engine.request import RequestKey
from engine.runner import EagerForward, GraphForward, MakeForward
from engine.stages import stage_of
from engine.step_plan import StepPlan
from engine.tier_worker import TierWorker
from engine.worker.config import WorkerConfig
from engine.worker.convert import key_from_proto, key_to_proto
from engine.worker.leading_model import (
    adapter_from_proto,
    forward_from_proto,
    ints_from_bytes,
)
from engine.worker.process import Report
from engine.worker.rank_part import RankPart, build_part, open_ops
from engine.worker.ranks import collectives_to_proto
from engine.worker.server import ServerThread
from engine.worker.tier_ranks import job_from_proto, tier_worker
from engine.worker.wire import Wire, WireClosed
from kvtransfer.connector import (
    BlockCopy,
    KVArrived,
    KVFailed,
    KVQuiet,
    ReceiveEvent,
    Receiver,
    Sender,
    Transfer,
    TransferResult,
)
from protos import ranks_pb2, worker_pb2, worker_pb2_grpc

_CONNECT_TIMEOUT_S = 30.0
_WELCOME_TIMEOUT_S = 120.0

_log = logging.getLogger(__name__)


MakeGraphs = Callable[[WorkerConfig, Report], MakeForward]
"""What makes the graphs of this rank; the leader has made its own alike."""


def run_follower(
    rank: int, address: str, token: str, host: str, graphs: MakeGraphs | None = None
) -> None:
    """Be rank `rank` of the engine whose leader listens at `address`; returns when it says stop.

    host: address to bind, on this machine. graphs: None: this role has none.
    Raises: WireClosed: the leader is gone. OSError: it does not answer.
    """
    wire = Wire.connect(address, _CONNECT_TIMEOUT_S)
    wire.send(_event(join=ranks_pb2.RankJoin(rank=rank, token=token)))
    welcome = ranks_pb2.RankCommand.FromString(wire.receive(_WELCOME_TIMEOUT_S)).welcome
    config = WorkerConfig.from_json(welcome.worker_json)
    config = replace(config, host=host, transfer=replace(config.transfer, host=host))
    torch.set_num_threads(config.num_threads)
    with ExitStack() as stack:
        stack.callback(wire.close)
        stack.callback(leave)
        store = TCPStore(welcome.store_host, welcome.store_port, None, False)
        try:
            ops = open_ops(config, _report_nothing)
            timeout_s = 2 * config.rank_timeout_s
            parallel = join(config.parallel, store, backend=ops.collectives, timeout_s=timeout_s)
            part = build_part(config, ops, parallel, _report_nothing)
            stack.callback(part.memory.close)
            transfers = _transfers(welcome, config, part, wire, stack)
            tiers = tier_worker(config, part.memory, welcome.role)
            stack.callback(tiers.close)
            tiers.start(partial(_report_tier_job, wire))
        except (ValueError, OSError, RuntimeError) as error:
            wire.send(_event(failed=ranks_pb2.RankFailed(error=f"{error}")))
            raise
        ready = ranks_pb2.RankReady(link_address=transfers.link_address)
        wire.send(_event(ready=ready))
        forward: GraphForward = EagerForward(part.model)
        if graphs is not None:
            # Every rank captures now, the leader included; they wait for each other.
            make = graphs(config, _report_nothing)
            forward = make(part.model, part.ops, part.forward_memory(config))
        _Commands(wire, part, forward, transfers, tiers).run()


def _report_nothing(phase: str, progress: float) -> None:
    """The leader reports for all."""


class _Transfers:
    """This rank's Sender or Receiver; what it reports goes to the leader."""

    def __init__(self, wire: Wire, sender: Sender | None, receiver: Receiver | None) -> None:
        self.link_address = ""
        self.receiver = receiver
        self._sender = sender
        self._wire = wire
        self._transfers: dict[RequestKey, Transfer] = {}

    def begin(self, command: ranks_pb2.BeginTransfer) -> None:
        """Open this rank's part of a transfer."""
        assert self._sender is not None, "a decoder does not send"
        key = key_from_proto(command.key)
        self._transfers[key] = self._sender.begin(key, command.target, self._on_done)

    def pusher(self, pushes: list[ranks_pb2.Push]) -> Callable[[int], None] | None:
        """What to call once a layer is written; None: nothing is to be pushed."""
        if not pushes or self._sender is None:
            return None
        plan = []
        for push in pushes:
            transfer = self._transfers.get(key_from_proto(push.key))
            if transfer is None:
                continue  # it has failed; the leader is about to learn it
            pairs = zip(push.block_ids, push.block_indices, strict=True)
            copies = [
                BlockCopy(block_id, index)
                for block_id, index in pairs
                if index in transfer.block_indices
            ]
            plan.append((transfer, copies))
        return self._sender.pusher(plan)

    def finish(self, key: RequestKey) -> None:
        """No more pushes; its end is reported."""
        if (transfer := self._transfers.pop(key, None)) is not None:
            transfer.finish()

    def withdraw(self, key: RequestKey, reason: str) -> None:
        """End it, which nobody needs; its end is reported."""
        if (transfer := self._transfers.pop(key, None)) is not None:
            transfer.withdraw(reason)

    def _on_done(self, result: TransferResult) -> None:
        self._transfers.pop(result.key, None)
        ended = ranks_pb2.TransferEnded(
            key=key_to_proto(result.key),
            error="" if result.ok else result.error or "failed",
            num_bytes=result.num_bytes,
            num_blocks=result.num_blocks,
        )
        _report(self._wire, transfer_ended=ended)


class _Commands:
    """Carries out the leader's commands.

    What computes, the end of transfers, which must come after its pushes, and what is to be kept of
    the KV cache: one after another on the caller's thread. What announces transfers: at once, on
    the thread that reads, or a writer could come before a forward pass ends and find nobody
    expecting it.
    """

    def __init__(
        self,
        wire: Wire,
        part: RankPart,
        forward: GraphForward,
        transfers: _Transfers,
        tiers: TierWorker,
    ) -> None:
        self._wire = wire
        self._tiers = tiers
        self._part = part
        self._replay = forward.replay
        self._parallel = part.parallel
        self._transfers = transfers
        self._hidden = torch.empty(0)
        self._stage = stage_of(part.model_config.num_layers, part.parallel.config)
        self._busy_s = 0.0
        self._collectives_before = 0
        self._queue: queue.SimpleQueue[ranks_pb2.RankCommand] = queue.SimpleQueue()

    @torch.inference_mode()
    def run(self) -> None:
        """Until the leader says stop; the process ends when it is gone."""
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        while True:
            command = self._queue.get()
            match command.WhichOneof("command"):
                case "forward":
                    self._forward(command.forward)
                case "logits":
                    self._logits(command.logits)
                case "put_adapter" if self._part.adapters is not None:
                    put = command.put_adapter
                    self._part.adapters.put(put.key, adapter_from_proto(put))
                case "drop_adapters" if self._part.adapters is not None:
                    self._part.adapters.drop(command.drop_adapters.keys)
                case "finish_transfer":
                    self._transfers.finish(key_from_proto(command.finish_transfer.key))
                case "tier_job":
                    self._tier_job(command.tier_job)
                case "abort_transfer":
                    abort = command.abort_transfer
                    self._transfers.withdraw(key_from_proto(abort.key), abort.reason)
                case _:
                    return

    def _read(self) -> None:
        try:
            while True:
                command = ranks_pb2.RankCommand.FromString(self._wire.receive())
                if not self._announce(command):
                    self._queue.put(command)
                if command.HasField("stop"):
                    return
        except WireClosed as error:
            # NOTE: the other thread may wait in a collective for ranks that are gone as well.
            _end(1, f"the leader is gone ({error})")
        except Exception:
            _log.exception("a command failed")
            _end(1, "a command failed")

    def _announce(self, command: ranks_pb2.RankCommand) -> bool:
        """Carry out what does not wait for the model; False: it is something else."""
        receiver = self._transfers.receiver
        match command.WhichOneof("command"):
            case "begin_transfer":
                self._transfers.begin(command.begin_transfer)
            case "expect" if receiver is not None:
                expect = command.expect
                receiver.expect(
                    key_from_proto(expect.key),
                    list(expect.block_ids),
                    first_block=expect.first_block,
                    num_tokens=expect.num_tokens,
                )
            case "ping":
                calls = self._parallel.counters.num_calls - self._collectives_before
                self._wire.send(_event(pong=ranks_pb2.Pong(num_collectives=calls)))
            case "tier_job" if not command.tier_job.write:
                self._tier_job(command.tier_job)
            case "cancel_expected" if receiver is not None:
                receiver.cancel(key_from_proto(command.cancel_expected.key))
            case _:
                return False
        return True

    def _forward(self, forward: ranks_pb2.Forward) -> None:
        self._begin_step(forward.step)
        start_s = time.perf_counter() - self._waited_s
        memory, parallel = self._part.memory, self._parallel
        input_ids, positions, kv = forward_from_proto(forward, *memory.paged)
        step = parallel.step
        plan = StepPlan(forward.bucket, forward.gathers_experts, cut=forward.cut)
        plan.is_even = forward.even_rows
        step.become(plan)
        if parallel.config.cp_size > 1:
            step.wanted_rows = ints_from_bytes(forward.wanted_rows)
        on_layer = self._transfers.pusher(list(forward.pushes))
        model = self._part.model
        if forward.draft_depth:
            states = self._hidden.new_empty(len(input_ids), model.config.hidden_size)
            states = parallel.tp.broadcast(states, 0)
            model.draft(input_ids, positions, states, kv, on_layer, forward.draft_depth - 1)
            self._end_step(forward.step)
            return
        if forward.graph_size:
            batch = Batch(input_ids, positions, kv, sample_rows=input_ids[:0])
            hidden = self._replay(batch, forward.graph_size)
        elif forward.adapters and self._part.adapters is not None:
            rows = {part.key: ints_from_bytes(part.rows).long() for part in forward.adapters}
            with self._part.adapters.rows.set(rows):
                hidden = model(input_ids, positions, kv, on_layer)
        else:
            hidden = model(input_ids, positions, kv, on_layer)
        self._hidden = hidden
        if forward.gathers and parallel.tp.rank == 0:
            wanted = hidden.index_select(0, ints_from_bytes(forward.wanted_rows).to(hidden.device))
            size = parallel.dp.size
            parallel.dp.all_to_all(wanted, [len(wanted)] + [0] * (size - 1), [0] * size)
        if parallel.link is not None and self._stage.is_last and parallel.tp.rank == 0:
            wanted_rows = ints_from_bytes(forward.wanted_rows).to(hidden.device)
            if len(wanted_rows):
                parallel.link.send_back(hidden.index_select(0, wanted_rows))
        self._busy_s += time.perf_counter() - self._waited_s - start_s
        self._end_step(forward.step)

    def _logits(self, logits: ranks_pb2.Logits) -> None:
        self._begin_step(logits.step)
        model = self._part.model
        hidden = self._hidden.new_empty(logits.num_rows, model.config.hidden_size)
        model.logits(self._parallel.tp.broadcast(hidden, 0))
        self._end_step(logits.step)

    def _begin_step(self, step: int) -> None:
        self._collectives_before = self._parallel.counters.num_calls
        self._wire.send(_event(step=ranks_pb2.RankStep(step=step)))

    def _end_step(self, step: int) -> None:
        config, counters = self._parallel.config, self._parallel.counters
        ended = ranks_pb2.RankStep(
            step=step,
            done=True,
            collectives=collectives_to_proto(config.rank, counters),
            busy_s=self._busy_s,
        )
        self._wire.send(_event(step=ended))

    @property
    def _waited_s(self) -> float:
        return 0.0 if self._parallel.link is None else self._parallel.link.waited_s

    def _tier_job(self, message: ranks_pb2.TierJob) -> None:
        if self._tiers.is_on:
            self._tiers.submit(message.number, job_from_proto(message))
        else:
            # None could be opened here: nothing is found, and there is nothing to copy.
            _report_tier_job(self._wire, message.number, 0)


def _transfers(
    welcome: ranks_pb2.RankWelcome,
    config: WorkerConfig,
    part: RankPart,
    wire: Wire,
    stack: ExitStack,
) -> _Transfers:
    if welcome.role == worker_pb2.ROLE_PREFILLER:
        sender = Sender(
            part.memory,
            engine_id=config.engine_id,
            incarnation=welcome.incarnation,
            config=config.transfer,
            token=config.cluster_token,
            replica=config.parallel.cp_rank,
            num_replicas=config.parallel.cp_size,
        )
        stack.callback(sender.close)
        return _Transfers(wire, sender, None)
    receiver = Receiver(
        part.memory,
        engine_id=config.engine_id,
        incarnation=welcome.incarnation,
        config=config.transfer,
        token=config.cluster_token,
        on_event=lambda event: _report_received(wire, event),
    )
    stack.callback(receiver.close)
    server = ServerThread("grpc")
    stack.callback(server.stop)
    transfers = _Transfers(wire, None, receiver)
    transfers.link_address = f"{config.host}:{server.bind(config.host)}"

    def add_link(grpc_server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_KVLinkServicer_to_server(receiver, grpc_server)

    server.start(add_link)
    return transfers


def _report_received(wire: Wire, event: ReceiveEvent) -> None:
    key = key_to_proto(event.key)
    match event:
        case KVArrived():
            _report(wire, arrived=ranks_pb2.Arrived(key=key))
        case KVFailed(_, reason, quiet, withdrawn):
            failed = ranks_pb2.NotArriving(key=key, reason=reason, quiet=quiet, withdrawn=withdrawn)
            _report(wire, not_arriving=failed)
        case KVQuiet():
            _report(wire, quiet=ranks_pb2.Quiet(key=key))


def _report_tier_job(wire: Wire, number: int, num_blocks: int) -> None:
    _report(wire, tier_job_done=ranks_pb2.TierJobDone(number=number, num_blocks=num_blocks))


def _event(**fields: object) -> bytes:
    return ranks_pb2.RankEvent(**fields).SerializeToString()  # type: ignore[arg-type]


def _report(wire: Wire, **fields: object) -> None:
    """Tell the leader from a transfer's thread, which must not fail."""
    try:
        wire.send(_event(**fields))
    except WireClosed:
        _log.debug("the leader is gone")


def _end(status: int, reason: str) -> None:
    if reason:
        _log.error("ending: %s", reason)
    logging.shutdown()
    os._exit(status)


def be_follower(
    rank: int, address: str, token: str, host: str, graphs: MakeGraphs | None = None
) -> None:
    """`run_follower`, then end the process: at once, whatever its threads do."""
    status = 1
    try:
        run_follower(rank, address, token, host, graphs)
        status = 0
    except WireClosed as error:
        _log.warning("rank %d: the leader is gone (%s)", rank, error)
    except Exception:
        _log.exception("rank %d failed", rank)
    _end(status, "")


def read_start() -> tuple[int, str, str, str]:
    """What `be_follower` takes, in a process that a Launcher starts on the leader's machine."""
    rank, address, token = json.loads(sys.stdin.read())
    return rank, address, token, address.rpartition(":")[0]


if __name__ == "__main__":
    be_follower(*read_start())
