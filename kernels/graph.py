"""What capturing a forward pass may raise, whichever backend does it."""


class CaptureError(RuntimeError):
    """The forward pass does something that cannot be replayed; the message says what."""
