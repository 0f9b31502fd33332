"""Which batch sizes get a graph on the NPU, where every one costs time to compile, and streams."""

import itertools
from collections.abc import Sequence


def plan_sizes(max_num_seqs: int, *, multiple_of: int, max_graphs: int) -> Sequence[int]:
    """Ascending sizes up to the first that holds max_num_seqs; the same on every rank.

    Powers of two, then as many between them as max_graphs allows: most where batches are largest,
    since there a padded row costs most of a step. All are multiples of `multiple_of`, the
    tensor-parallel size, so that rows can be scattered.
    """
    if min(max_num_seqs, multiple_of, max_graphs) < 1:
        raise ValueError(
            f"max_num_seqs, multiple_of and max_graphs are {max_num_seqs}, {multiple_of} and "
            f"{max_graphs}, all must be at least 1"
        )
    last = -(-max_num_seqs // multiple_of)
    units = {last}
    power = 1
    while power < last:
        units.add(power)
        power *= 2
    if len(units) > max_graphs:
        units = set(sorted(units)[-max_graphs:])
    while len(units) < max_graphs:
        ordered = sorted(units)
        gaps = [(high - low, high, low) for low, high in itertools.pairwise(ordered)]
        width, high, low = max(gaps, default=(0, 0, 0))
        if width < 2:
            break
        units.add((low + high) // 2)
    return [unit * multiple_of for unit in sorted(units)]
