"""A man in the middle of a proxy and a worker: the real worker, with a fault on its wire."""

from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from protos import worker_pb2, worker_pb2_grpc


class Refused(Exception):
    """Raised by a hook: end the session with this status."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code.name)
        self.code = code


class Relay(worker_pb2_grpc.WorkerServicer):
    """Forwards sessions in order; a hook may hold a message up, change it, or end the session."""

    def __init__(self, entry: worker_pb2.WorkerEntry) -> None:
        self.on_request: Callable[[worker_pb2.ProxyMessage], None] = lambda message: None
        self.on_reply: Callable[[worker_pb2.WorkerMessage], None] = lambda message: None
        self._channel = grpc.insecure_channel(entry.address)
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.entry = worker_pb2.WorkerEntry()
        self.entry.CopyFrom(entry)
        self.entry.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Session(
        self, request_iterator: Iterator[worker_pb2.ProxyMessage], context: Any
    ) -> Iterator[worker_pb2.WorkerMessage]:
        refusals: list[Refused] = []

        def requests() -> Iterator[worker_pb2.ProxyMessage]:
            try:
                for message in request_iterator:
                    self.on_request(message)
                    yield message
            except Refused as refused:
                refusals.append(refused)
                replies.cancel()
            except grpc.RpcError:
                return  # the proxy hung up

        metadata = [pair for pair in context.invocation_metadata() if pair[0] == "x-pdserve-token"]
        replies = worker_pb2_grpc.WorkerStub(self._channel).Session(requests(), metadata=metadata)
        context.add_callback(replies.cancel)
        try:
            for message in replies:
                self.on_reply(message)
                yield message
        except grpc.RpcError as error:
            code = refusals[0].code if refusals else error.code()
            context.abort(code, "the relay ends here")

    def close(self) -> None:
        self._server.stop(0).wait(5)
        self._channel.close()
