"""Which keys a worker keeps, for which proxy stream, and until when."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.request import RequestKey


@dataclass(slots=True)
class _Lease:
    session_id: int
    expires_s: float


class Leases:
    """One lease per key, renewed by the proxy's heartbeat; times are time.monotonic()."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: dict[RequestKey, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._leases

    def grant(self, key: RequestKey, session_id: int, now_s: float) -> None:
        """Start a lease."""
        self._leases[key] = _Lease(session_id, now_s + self._lease_s)

    def renew(self, keys: Iterable[RequestKey], now_s: float) -> None:
        """Extend the leases of `keys`; unknown ones are ignored."""
        for key in keys:
            if (lease := self._leases.get(key)) is not None:
                lease.expires_s = now_s + self._lease_s

    def drop(self, key: RequestKey) -> int | None:
        """End a lease; return its session, or None if there was none."""
        lease = self._leases.pop(key, None)
        return None if lease is None else lease.session_id

    def session_of(self, key: RequestKey) -> int | None:
        """The stream that a key came over."""
        lease = self._leases.get(key)
        return None if lease is None else lease.session_id

    def of_session(self, session_id: int) -> list[RequestKey]:
        """Every key that came over a stream."""
        return [key for key, lease in self._leases.items() if lease.session_id == session_id]

    def expired(self, now_s: float) -> list[RequestKey]:
        """Keys that were not renewed in time."""
        return [key for key, lease in self._leases.items() if lease.expires_s <= now_s]
