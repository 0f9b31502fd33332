"""Where experts go so that every rank gets about as many tokens.

    load --> copies: the redundant slots go, one by one, to whichever expert has most per copy
         --> pack: the heaviest copy first, on the lightest rank that has a slot left
         --> exchange: copies of the hottest rank against lighter ones, while that helps

With several nodes and groups of experts, groups are packed on nodes first, so that a token whose
router picks few groups crosses few hosts; then each node is balanced like the above.

Source: the description of the expert-parallel load balancer in DeepSeek-V3 (arXiv 2412.19437,
sections 3.4.1 and 3.4.2) and in the README of github.com/deepseek-ai/EPLB.
"""

from collections.abc import Sequence

from engine.expert_placement import ExpertPlacement

_MAX_EXCHANGES = 32


def plan(
    load: Sequence[float],
    *,
    num_redundant: int,
    num_ranks: int,
    num_nodes: int = 1,
    num_groups: int = 1,
) -> ExpertPlacement:
    """A placement for experts with these numbers of tokens; equal input, equal result.

    Groups stay whole on nodes where num_nodes divides num_groups, else nodes do not count.
    Raises: ValueError: the slots cannot be dealt out.
    """
    num_experts = len(load)
    num_slots = num_experts + num_redundant
    check_slots(num_experts, num_redundant, num_ranks)
    if not _fits_nodes(num_experts, num_redundant, num_ranks, num_nodes, num_groups):
        ranks = _pack(_copies(load, range(num_experts), num_slots, num_ranks), load, num_ranks)
    else:
        size = num_experts // num_groups
        totals = [sum(load[g * size : (g + 1) * size]) for g in range(num_groups)]
        ranks = []
        for groups in _deal(totals, num_nodes):
            experts = [e for g in groups for e in range(g * size, (g + 1) * size)]
            copies = _copies(load, experts, num_slots // num_nodes, num_ranks // num_nodes)
            ranks += _pack(copies, load, num_ranks // num_nodes)
    return ExpertPlacement(tuple(e for rank in ranks for e in rank), num_experts, num_ranks)


def _fits_nodes(
    num_experts: int, num_redundant: int, num_ranks: int, num_nodes: int, num_groups: int
) -> bool:
    """Whether groups, ranks and redundant slots can be dealt out over nodes."""
    if num_nodes == 1 or any(n % num_nodes for n in (num_groups, num_ranks, num_redundant)):
        return False
    return num_redundant <= num_experts * (num_ranks // num_nodes - 1)


def check_slots(num_experts: int, num_redundant: int, num_ranks: int) -> None:
    """Raises: ValueError: they cannot be dealt out evenly, an expert never twice to a rank."""
    if (num_experts + num_redundant) % num_ranks:
        raise ValueError(
            f"num_experts is {num_experts} and num_redundant_experts {num_redundant}: their sum is "
            f"not a multiple of ep_size {num_ranks}"
        )
    if num_redundant > (most := num_experts * (num_ranks - 1)):
        raise ValueError(
            f"num_redundant_experts is {num_redundant}, at most {most}: one copy of {num_experts} "
            f"experts on each of {num_ranks} ranks"
        )


def rank_loads(load: Sequence[float], placement: ExpertPlacement) -> list[float]:
    """Tokens of every rank where the copies of an expert share its tokens evenly."""
    num_copies = [len(slots) for slots in placement.slots_of()]
    return [
        sum(load[e] / num_copies[e] for e in placement.of_rank(rank))
        for rank in range(placement.num_ranks)
    ]


def imbalance(load: Sequence[float], placement: ExpertPlacement) -> float:
    """Tokens of the hottest rank over the mean; 1 is even, or no load."""
    loads = rank_loads(load, placement)
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def near(new: ExpertPlacement, old: ExpertPlacement, num_nodes: int = 1) -> ExpertPlacement:
    """`new` with its ranks, within nodes, and slots renamed so that more of `old` stays."""
    per_node = new.num_ranks // num_nodes
    held_by: list[tuple[int, ...]] = [()] * new.num_ranks
    for first in range(0, new.num_ranks, per_node):
        node = range(first, first + per_node)
        shared = sorted(
            (-len(set(new.of_rank(n)) & set(old.of_rank(o))), n, o) for n in node for o in node
        )
        free, left = set(node), set(node)
        for _, n, o in shared:
            if n in left and o in free:
                held_by[o] = _in_place(new.of_rank(n), old.of_rank(o))
                left.discard(n)
                free.discard(o)
    return ExpertPlacement(
        tuple(e for rank in held_by for e in rank), new.num_experts, new.num_ranks
    )


def _in_place(new: Sequence[int], old: Sequence[int]) -> tuple[int, ...]:
    """The experts of a rank, those that were there before in their slots."""
    arriving = iter([e for e in new if e not in old])
    return tuple(e if e in new else next(arriving) for e in old)


def _copies(
    load: Sequence[float], experts: Sequence[int], num_slots: int, num_ranks: int
) -> dict[int, int]:
    """How often each expert is there; at most once per rank."""
    copies = dict.fromkeys(experts, 1)
    for _ in range(num_slots - len(experts)):
        hottest = max(
            (e for e in experts if copies[e] < num_ranks), key=lambda e: (load[e] / copies[e], -e)
        )
        copies[hottest] += 1
    return copies


def _pack(copies: dict[int, int], load: Sequence[float], num_ranks: int) -> list[list[int]]:
    """The experts of every rank, equally many."""
    share = {e: load[e] / n for e, n in copies.items()}
    num_slots = sum(copies.values()) // num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    items = sorted((e for e, n in copies.items() for _ in range(n)), key=lambda e: (-share[e], e))
    for expert in items:
        open_ranks = [r for r in range(num_ranks) if len(ranks[r]) < num_slots]
        fitting = [r for r in open_ranks if expert not in ranks[r]]
        if fitting:
            rank = min(fitting, key=lambda r: (loads[r], len(ranks[r]), r))
        else:
            rank = _make_room(ranks, loads, share, open_ranks[0], expert)
        ranks[rank].append(expert)
        loads[rank] += share[expert]
    for _ in range(_MAX_EXCHANGES):
        if not _exchange(ranks, loads, share):
            break
    return ranks


def _make_room(
    ranks: list[list[int]], loads: list[float], share: dict[int, float], open_rank: int, expert: int
) -> int:
    """Move something from a full rank without `expert` to one that has it and a slot left.

    There is such a rank, as an expert has at most as many copies as there are ranks; and it holds
    something that the open one, with fewer experts, does not.
    """
    full = next(r for r in range(len(ranks)) if expert not in ranks[r])
    moved = min((e for e in ranks[full] if e not in ranks[open_rank]), key=lambda e: (share[e], e))
    ranks[full].remove(moved)
    ranks[open_rank].append(moved)
    loads[full] -= share[moved]
    loads[open_rank] += share[moved]
    return full


def _exchange(ranks: list[list[int]], loads: list[float], share: dict[int, float]) -> bool:
    """Swap one copy of the hottest rank for a lighter one, so that neither ends up as hot."""
    hottest = max(range(len(ranks)), key=lambda r: loads[r])
    best, found = 0.0, None
    for rank, held in enumerate(ranks):
        gap = loads[hottest] - loads[rank]
        for i, mine in enumerate(ranks[hottest]):
            for j, other in enumerate(held):
                moved = share[mine] - share[other]
                # Of two ranks that differ by `gap`, the hotter one cools by the smaller of both.
                gain = min(moved, gap - moved)
                if gain > best + 1e-12 and mine not in held and other not in ranks[hottest]:
                    best, found = gain, (rank, i, j)
    if found is None or best <= 1e-3 * loads[hottest]:
        return False
    rank, i, j = found
    moved = share[ranks[hottest][i]] - share[ranks[rank][j]]
    ranks[hottest][i], ranks[rank][j] = ranks[rank][j], ranks[hottest][i]
    loads[hottest] -= moved
    loads[rank] += moved
    return True


def _deal(totals: Sequence[float], num_nodes: int) -> list[list[int]]:
    """Groups of every node, equally many, the heaviest first to the lightest node."""
    nodes: list[list[int]] = [[] for _ in range(num_nodes)]
    loads = [0.0] * num_nodes
    per_node = len(totals) // num_nodes
    for group in sorted(range(len(totals)), key=lambda g: (-totals[g], g)):
        node = min(
            (n for n in range(num_nodes) if len(nodes[n]) < per_node), key=lambda n: (loads[n], n)
        )
        nodes[node].append(group)
        loads[node] += totals[group]
    return nodes
