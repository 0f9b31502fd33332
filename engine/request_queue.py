"""Requests in the order they are served: by priority, then by a number that the caller gives."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.request import Request, RequestKey


class RequestQueue:
    """Sorted by (priority, order); lower first. An order number is used once per priority.

    A plain sorted list: it is short, and moving a thousand pointers costs less than a lazy heap.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Request]] = []
        self._places: dict[RequestKey, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        return request.key in self._places

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._entries)

    def push(self, request: Request, order: int) -> None:
        """Insert a request that is not in the queue."""
        assert request.key not in self._places, f"{request.key} is queued already"
        self._places[request.key] = (request.priority, order)
        insort(self._entries, (request.priority, order, request))

    def first_place(self) -> tuple[int, int] | None:
        """(priority, order) of the first request; None when empty."""
        return self._entries[0][:2] if self._entries else None

    def first(self) -> Request:
        """The request to serve next; the queue must not be empty."""
        return self._entries[0][2]

    def last(self) -> Request:
        """The request to serve last; the queue must not be empty."""
        return self._entries[-1][2]

    def remove(self, request: Request) -> bool:
        """Take the request out; False if it is not in."""
        place = self._places.pop(request.key, None)
        if place is None:
            return False
        # (priority, order) is unique: it sorts just before its entry; requests are not compared.
        del self._entries[bisect_left(self._entries, place)]
        return True
