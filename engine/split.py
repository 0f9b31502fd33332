"""Which part of something each rank of a tensor-parallel group has. Needs no torch."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Place(Protocol):
    """A rank of a group."""

    @property
    def rank(self) -> int:
        """Of this process, within the group."""
        ...

    @property
    def size(self) -> int:
        """Ranks of the group."""
        ...


class Rank(NamedTuple):
    """Implements `Place`."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Span:
    """The part [start, stop) that a rank holds of `total`."""

    start: int
    stop: int
    total: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def index(self) -> slice:
        """The part as an index."""
        return slice(self.start, self.stop)

    def scaled(self, width: int) -> "Span":
        """The same part where each number stands for `width` of them."""
        return Span(self.start * width, self.stop * width, self.total * width)

    @classmethod
    def whole(cls, total: int) -> "Span":
        """All of it."""
        return cls(0, total, total)


def split_evenly(name: str, total: int, group: Place, unit: int = 1) -> Span:
    """The part of this rank where each holds as much; `unit` numbers go together.

    Raises: ValueError: it does not divide; says `name`.
    """
    if total % (unit * group.size):
        raise ValueError(f"{name} is {total // unit}, not a multiple of tp_size {group.size}")
    width = total // group.size
    return Span(group.rank * width, (group.rank + 1) * width, total)


def split_kv_heads(num_kv_heads: int, group: Place) -> Span:
    """KV heads of this rank; where there are fewer heads than ranks, several hold the same one.

    Raises: ValueError: neither number divides the other.
    """
    if group.size <= num_kv_heads:
        return split_evenly("num_kv_heads", num_kv_heads, group)
    if group.size % num_kv_heads:
        raise ValueError(f"tp_size is {group.size}, not a multiple of num_kv_heads {num_kv_heads}")
    head = group.rank // (group.size // num_kv_heads)
    return Span(head, head + 1, num_kv_heads)
