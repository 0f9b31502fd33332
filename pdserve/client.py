"""The controller and the workers, asked from the command line: gRPC only, no Ray."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc

from pdserve.errors import PdserveError
from pdserve.wire import CHANNEL_OPTIONS, token_metadata
from protos import worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 5.0

_Reply = TypeVar("_Reply")


class ControllerError(PdserveError):
    """The controller refused, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class ControllerClient:
    """Blocking calls to one controller."""

    stub: worker_pb2_grpc.ControllerStub
    token: str

    def status(self) -> worker_pb2.ServiceStatus:
        """Who is there, and how many there should be.

        Raises: ControllerError.
        """
        return self._call(
            lambda: self.stub.GetStatus(
                worker_pb2.GetStatusRequest(),
                metadata=token_metadata(self.token),
                timeout=_TIMEOUT_S,
            )
        )

    def scale(
        self, *, prefillers: int | None, decoders: int | None, grace_s: float
    ) -> worker_pb2.ServiceStatus:
        """Ask for other numbers; returns before they are reached.

        Raises: ControllerError.
        """
        request = worker_pb2.ScaleRequest(
            prefillers=prefillers, decoders=decoders, grace_ms=round(grace_s * 1000)
        )
        return self._call(
            lambda: self.stub.Scale(
                request, metadata=token_metadata(self.token), timeout=_TIMEOUT_S
            )
        )

    def stop(self, timeout_s: float) -> None:
        """End every worker; waits for a controller that has not begun to answer yet.

        Raises: ControllerError: not done in time, or the controller is gone.
        """
        self._call(
            lambda: self.stub.Stop(
                worker_pb2.StopRequest(),
                metadata=token_metadata(self.token),
                timeout=timeout_s,
                wait_for_ready=True,
            )
        )

    def worker_stats(self, address: str) -> worker_pb2.WorkerStats | None:
        """A worker's own figures; None if it does not answer."""
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            try:
                return worker_pb2_grpc.WorkerStub(channel).GetStats(
                    worker_pb2.GetStatsRequest(),
                    metadata=token_metadata(self.token),
                    timeout=_TIMEOUT_S,
                )
            except grpc.RpcError:
                return None

    def _call(self, call: Callable[[], _Reply]) -> _Reply:
        try:
            return call()
        except grpc.RpcError as error:
            raise ControllerError(f"controller: {error.details()}") from None


@contextmanager
def connect(address: str, token: str) -> Iterator[ControllerClient]:
    """A client of the controller at host:port."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        yield ControllerClient(worker_pb2_grpc.ControllerStub(channel), token)
