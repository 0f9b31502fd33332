"""Frames over one TCP connection between two ranks of an engine."""

import socket
import struct
import threading
from contextlib import suppress

_LENGTH = struct.Struct(">I")
_MAX_BYTES = 1 << 30


class WireClosed(Exception):
    """The other end is gone."""


class Wire:
    """Sends from any thread; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self._socket = connection
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, address: str, timeout_s: float) -> "Wire":
        """To host:port. Raises: OSError: nobody answers."""
        host, _, port = address.rpartition(":")
        return cls(socket.create_connection((host, int(port)), timeout_s))

    def send(self, frame: bytes) -> None:
        """Raises: WireClosed: the other end is gone."""
        try:
            with self._lock:
                self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError as error:
            raise WireClosed(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for the next frame.

        Raises: WireClosed: the other end is gone. TimeoutError: nothing came in time.
        """
        self._socket.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > _MAX_BYTES:
            raise WireClosed(f"frame of {length} bytes, at most {_MAX_BYTES}")
        return self._read(length)

    def close(self) -> None:
        """End both directions; a receiver wakes with WireClosed."""
        with suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._socket.recv(size - len(parts))
            except TimeoutError:
                raise
            except OSError as error:
                raise WireClosed(str(error)) from None
            if not part:
                raise WireClosed("end of stream")
            parts += part
        return bytes(parts)
