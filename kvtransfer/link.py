"""What both ends of a KVLink agree on: credentials, channel options, events and results."""

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protos import worker_pb2

RequestKey = tuple[str, int]
"""(request_id, attempt)."""

TOKEN_METADATA = "x-pdserve-token"

# NOTE: a dead process closes its sockets, which breaks the link at once. Pings are only for a host
# that vanished. They are slow on purpose: a writer that was merely paused must not be taken for
# dead, its next write could land in a block that was given away. Only the reader pings; a writer
# finds a silent reader by its own deadlines.
LINK_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 15_000),
)
"""For the server that a reader's KVLink runs in."""


class BlockCopy(NamedTuple):
    """A block of the writer, and which of the prompt's blocks it holds, in the writer's size."""

    source_block_id: int
    block_index: int
    """Tokens from block_index * block_size on."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """How a transfer ended for the writer."""

    key: RequestKey
    ok: bool
    error: str
    """Empty if ok."""
    num_bytes: int
    """Counted by the transport, over all ranks of the reader."""
    num_blocks: int
    """Blocks of the writer of which every layer was written."""


@dataclass(frozen=True, slots=True)
class KVArrived:
    """All blocks are in place and check; the writer never touches them again."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class KVFailed:
    """The blocks will not arrive. Unless quiet, they must not be reused before KVQuiet follows."""

    key: RequestKey
    reason: str
    quiet: bool
    withdrawn: bool = False
    """The writer was told that nobody needs them: no failure of a transfer."""


@dataclass(frozen=True, slots=True)
class KVQuiet:
    """Nobody writes into the blocks of this key any more."""

    key: RequestKey


ReceiveEvent = KVArrived | KVFailed | KVQuiet


def key_to_proto(key: RequestKey) -> worker_pb2.RequestKey:
    """The key on the wire."""
    return worker_pb2.RequestKey(request_id=key[0], attempt=key[1])


def key_from_proto(message: worker_pb2.RequestKey) -> RequestKey:
    """Read what key_to_proto wrote."""
    return message.request_id, message.attempt


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that a client sends with each call; empty if the cluster has no token."""
    return ((TOKEN_METADATA, token),) if token else ()


ACCEPTED = (("pdserve-link", "accepted"),)
"""The initial metadata of a link that its reader lets in."""


def is_accepted(metadata: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether a reader's initial metadata says so; a refused call has none."""
    return ACCEPTED[0] in map(tuple, metadata or ())


def is_authorized(metadata: Iterable[tuple[str, str | bytes]], token: str) -> bool:
    """Whether a call carries the token, compared in constant time.

    Anything goes if there is none.
    """
    if not token:
        return True
    given = next((value for name, value in metadata if name == TOKEN_METADATA), "")
    given_bytes = given.encode() if isinstance(given, str) else given
    return hmac.compare_digest(given_bytes, token.encode())
