"""The public face of this room for prefiller and decoder: Sender on one side, Receiver on the
other.
"""

from kvtransfer.link import (
    LINK_OPTIONS,
    TOKEN_METADATA,
    BlockCopy,
    KVArrived,
    KVFailed,
    KVQuiet,
    ReceiveEvent,
    TransferResult,
)
from kvtransfer.receiver import Receiver
from kvtransfer.receiver_stats import ReceiverStats
from kvtransfer.sender import Sender
from kvtransfer.transfer import Transfer

__all__ = [
    "LINK_OPTIONS",
    "TOKEN_METADATA",
    "BlockCopy",
    "KVArrived",
    "KVFailed",
    "KVQuiet",
    "ReceiveEvent",
    "Receiver",
    "ReceiverStats",
    "Sender",
    "Transfer",
    "TransferResult",
]
