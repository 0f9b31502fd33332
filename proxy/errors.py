"""Errors that a client sees, each with its HTTP status, OpenAI error body and gRPC status.

ProxyError
|-- InvalidRequest          400  INVALID_ARGUMENT
|   |-- ContextLengthExceeded
|   `-- Unsupported
|-- BodyTooLarge            413  INVALID_ARGUMENT
|-- Unauthenticated         401  UNAUTHENTICATED
|-- ModelNotFound           404  NOT_FOUND
|-- RouteNotFound           404  NOT_FOUND
|-- MethodNotAllowed        405  UNIMPLEMENTED
|-- DeadlineExceeded        408  DEADLINE_EXCEEDED
|-- Overloaded              429  RESOURCE_EXHAUSTED
|   `-- RateLimited
|-- InternalError           500  INTERNAL
`-- Unavailable             503  UNAVAILABLE
ClientDisconnected          nobody is left to tell
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import grpc

_MAX_NAMES = 10  # that a message lists


class ProxyError(Exception):
    """A failure with an answer for the client."""

    status: ClassVar[int] = 500
    grpc_status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    error_type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's error body."""
        return {
            "error": {
                "message": self.message,
                "type": self.error_type,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(ProxyError):
    """The request itself is wrong; sending it again cannot help."""

    status = 400
    grpc_status = grpc.StatusCode.INVALID_ARGUMENT
    error_type = "invalid_request_error"
    default_code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt and max_tokens, do not fit the context."""

    default_code = "context_length_exceeded"


class Unsupported(InvalidRequest):
    """A known option that this service does not have."""

    default_code = "unsupported_parameter"


class BodyTooLarge(InvalidRequest):
    """The request body exceeds the limit."""

    status = 413
    default_code = "request_too_large"

    @classmethod
    def beyond(cls, limit_bytes: int) -> Self:
        """The body has more than `limit_bytes`."""
        return cls(f"the body has more than {limit_bytes} bytes, which is the limit")


class Unauthenticated(ProxyError):
    """No API key, or a wrong one."""

    status = 401
    grpc_status = grpc.StatusCode.UNAUTHENTICATED
    error_type = "authentication_error"
    default_code = "missing_api_key"


class ModelNotFound(ProxyError):
    """The model name is not served here."""

    status = 404
    grpc_status = grpc.StatusCode.NOT_FOUND
    error_type = "invalid_request_error"
    default_code = "model_not_found"

    @classmethod
    def of(cls, name: str, known: Sequence[str]) -> Self:
        """It is none of the known ones."""
        shown = ", ".join(known[:_MAX_NAMES]) + (", ..." if len(known) > _MAX_NAMES else "")
        return cls(f"The model `{name[:100]}` does not exist; served: {shown}", param="model")


class RouteNotFound(ProxyError):
    """No such path."""

    status = 404
    grpc_status = grpc.StatusCode.NOT_FOUND
    error_type = "invalid_request_error"
    default_code = "not_found"


class MethodNotAllowed(ProxyError):
    """The path exists, the method does not."""

    status = 405
    grpc_status = grpc.StatusCode.UNIMPLEMENTED
    error_type = "invalid_request_error"
    default_code = "method_not_allowed"


class DeadlineExceeded(ProxyError):
    """The request ran out of time."""

    status = 408
    grpc_status = grpc.StatusCode.DEADLINE_EXCEEDED
    error_type = "timeout_error"
    default_code = "deadline_exceeded"


class Overloaded(ProxyError):
    """No capacity now; later there may be."""

    status = 429
    grpc_status = grpc.StatusCode.RESOURCE_EXHAUSTED
    error_type = "rate_limit_error"
    default_code = "overloaded"


class RateLimited(Overloaded):
    """The API key has used up what it may use per minute."""

    default_code = "rate_limit_exceeded"


class InternalError(ProxyError):
    """A defect of this service."""


class Unavailable(ProxyError):
    """No worker could serve the request."""

    status = 503
    grpc_status = grpc.StatusCode.UNAVAILABLE
    error_type = "service_unavailable_error"
    default_code = "unavailable"


class ClientDisconnected(Exception):
    """The client closed its connection."""
