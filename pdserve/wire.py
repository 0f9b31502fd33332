"""The secret in the metadata of every call inside the service."""

import hmac

import grpc

_KEY = "x-pdserve-token"

CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # Else a ping follows each message, to measure the connection; these messages are small.
    ("grpc.http2.bdp_probe", 0),
)
"""Of calls inside the service: no HTTP proxy, no back-off that is shared."""


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a caller sends."""
    return ((_KEY, token),) if token else ()


def has_token(metadata: grpc.aio.Metadata | None, token: str) -> bool:
    """Whether a caller sent the secret; compared in constant time."""
    if not token:
        return True
    sent = dict(metadata or ()).get(_KEY, "")
    return hmac.compare_digest(str(sent).encode(), token.encode())


def insecure_channel(address: str) -> grpc.aio.Channel:
    """A connection of its own to a peer inside the service; no HTTP proxy, no shared back-off."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
