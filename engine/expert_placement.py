"""Which rank of an expert-parallel group holds which experts.

Every rank has the same number of slots; slot s is on rank s // slots_per_rank. A slot holds one
expert; an expert may have several slots, on different ranks, which share its tokens.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The expert of every slot."""

    experts: tuple[int, ...]
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        if len(self.experts) % self.num_ranks:
            raise ValueError(f"{len(self.experts)} slots, not a multiple of {self.num_ranks} ranks")
        if missing := sorted(set(range(self.num_experts)) - set(self.experts)):
            raise ValueError(f"experts {missing} have no slot")
        if unknown := sorted(set(self.experts) - set(range(self.num_experts))):
            raise ValueError(f"experts {unknown} are in slots, the model has {self.num_experts}")
        for rank in range(self.num_ranks):
            held = self.of_rank(rank)
            if len(set(held)) < len(held):
                raise ValueError(f"rank {rank} holds an expert twice: {list(held)}")

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> "ExpertPlacement":
        """Each expert once, in order.

        Raises: ValueError: they cannot be dealt out evenly.
        """
        if num_experts % num_ranks:
            raise ValueError(f"num_experts is {num_experts}, not a multiple of ep_size {num_ranks}")
        return cls(tuple(range(num_experts)), num_experts, num_ranks)

    @property
    def slots_per_rank(self) -> int:
        """Experts that a rank holds."""
        return len(self.experts) // self.num_ranks

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Experts of a rank, by slot."""
        size = self.slots_per_rank
        return self.experts[rank * size : (rank + 1) * size]

    @property
    def num_slots(self) -> int:
        """Of all ranks."""
        return len(self.experts)

    def slots_of(self) -> list[list[int]]:
        """Slots of every expert, in order."""
        slots: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.experts):
            slots[expert].append(slot)
        return slots


@dataclass(frozen=True, slots=True)
class Move:
    """The weights of one expert, from a slot of the old placement to one of the new."""

    expert: int
    source: int
    target: int


def moves(old: ExpertPlacement, new: ExpertPlacement) -> list[Move]:
    """What has to move, by target; every rank computes the same.

    From a slot of the same rank where there is one, else from the holder that sends least so far.
    """
    found = []
    sends = [0] * old.num_ranks
    holders = old.slots_of()
    size = new.slots_per_rank
    for target, expert in enumerate(new.experts):
        if old.experts[target] == expert:
            continue
        near = [s for s in holders[expert] if s // size == target // size]
        source = near[0] if near else min(holders[expert], key=lambda s: (sends[s // size], s))
        if not near:
            sends[source // size] += 1
        found.append(Move(expert, source, target))
    return found
