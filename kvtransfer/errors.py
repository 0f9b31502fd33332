"""What goes wrong in a transfer.

KVTransferError
├── TransportUnavailable   a transport cannot be loaded here or cannot reach this peer
└── TransferError          bytes did not arrive; the attempt is over, the peer is not banned
"""


class KVTransferError(Exception):
    """Root of this room's errors."""


class TransportUnavailable(KVTransferError):
    """The transport cannot be used here or with this peer; the message says why."""


class TransferError(KVTransferError):
    """A write failed or ran into its deadline; the message says where."""
