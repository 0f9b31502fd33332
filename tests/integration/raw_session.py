"""A worker's session without a proxy: a test sends whatever it likes."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from protos import worker_pb2, worker_pb2_grpc
from tests.integration.service import TOKEN, Worker

_TIMEOUT_S = 60.0


def sampling(**fields: Any) -> worker_pb2.SamplingParams:
    """Greedy and short, unless told otherwise."""
    values = {"top_p": 1, "repetition_penalty": 1, "max_tokens": 4, "ignore_eos": True, **fields}
    return worker_pb2.SamplingParams(**values)


def work(token_ids: list[int], **fields: Any) -> worker_pb2.Work:
    """Of a new request."""
    return worker_pb2.Work(
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=sampling(**fields),
        deadline_ms=30_000,
    )


class RawSession:
    """What was sent to a worker, and all that it answered."""

    def __init__(self) -> None:
        self.outgoing: queue.Queue[worker_pb2.ProxyMessage | None] = queue.Queue()
        self._received: list[worker_pb2.WorkerMessage] = []
        self._condition = threading.Condition()
        self._end: str | None = None

    def send(self, **message: Any) -> None:
        """One ProxyMessage, by the name of its kind."""
        self.outgoing.put(worker_pb2.ProxyMessage(**message))

    def wait_for(
        self, condition: Callable[[worker_pb2.WorkerMessage], bool]
    ) -> worker_pb2.WorkerMessage:
        """The first message like that, from the session's beginning on."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        with self._condition:
            while True:
                for message in self._received:
                    if condition(message):
                        return message
                assert self._end is None, f"the session ended: {self._end}"
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"not among {self._received}"
                self._condition.wait(left_s)

    def wait_reserved(self, key: worker_pb2.RequestKey) -> worker_pb2.Reserved:
        return self.wait_for(lambda m: m.HasField("reserved") and m.reserved.key == key).reserved

    def wait_released(self, key: worker_pb2.RequestKey) -> None:
        self.wait_for(lambda m: m.HasField("released") and m.released.key == key)

    def failure(self, key: worker_pb2.RequestKey) -> worker_pb2.Failed | None:
        """What the worker said against a request, so far."""
        with self._condition:
            found = [m.failed for m in self._received if m.HasField("failed")]
        return next((failed for failed in found if failed.key == key), None)

    def read(self, stream: Iterator[worker_pb2.WorkerMessage]) -> None:
        """Until the session ends."""
        end = "by the worker"
        try:
            for message in stream:
                with self._condition:
                    self._received.append(message)
                    self._condition.notify_all()
        except grpc.RpcError as error:
            end = str(error)
        with self._condition:
            self._end = end
            self._condition.notify_all()


@contextmanager
def raw_session(worker: Worker) -> Iterator[RawSession]:
    """One that is over afterwards."""
    session = RawSession()
    with grpc.insecure_channel(worker.info["address"]) as channel:
        stream = worker_pb2_grpc.WorkerStub(channel).Session(
            iter(session.outgoing.get, None), metadata=(("x-pdserve-token", TOKEN),)
        )
        reader = threading.Thread(target=session.read, args=(stream,), daemon=True)
        reader.start()
        try:
            yield session
        finally:
            session.outgoing.put(None)
            stream.cancel()
            reader.join(_TIMEOUT_S)
