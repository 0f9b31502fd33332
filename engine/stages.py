"""Which layers each stage of a pipeline computes.

Consecutive ones, as many in each stage as in any other, or one more: those left over go to the last
stages, since the first one has the vocabulary's two matrices besides and leads the engine.

    stage 0: embedding, layers, and of what comes back from the last: output projection, sampling
    stage i: layers
    last:    layers, final norm
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.parallel_config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model's layers that one rank computes."""

    layers: range
    """Indices in the model."""
    is_first: bool
    is_last: bool
    max_layers: int
    """Of any stage."""

    def own_index(self, layer_idx: int) -> int:
        """Of a layer of the model among those of this rank."""
        return layer_idx - self.layers.start

    def unused_prefixes(self, num_layers: int) -> tuple[str, ...]:
        """What the names of weights start with that other stages read; num_layers: the model's."""
        unused = [f"model.layers.{i}." for i in range(num_layers) if i not in self.layers]
        if not self.is_first:
            unused += ["model.embed_tokens.", "lm_head."]
        if not self.is_last:
            unused.append("model.norm.")
        return tuple(unused)


def split_layers(num_layers: int, num_stages: int, chosen: Sequence[int] = ()) -> list[range]:
    """Layers of every stage; chosen: how many each is to have, () leaves it open.

    Raises: ValueError: a stage would have none, or the numbers chosen are not those of the model.
    """
    if num_stages > num_layers:
        raise ValueError(f"pp is {num_stages}, the model has {num_layers} layers")
    counts = list(chosen)
    if not counts:
        least, left = divmod(num_layers, num_stages)
        counts = [least + (stage >= num_stages - left) for stage in range(num_stages)]
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise ValueError(
            f"pp_layers is {counts}: must be {num_stages} numbers above 0, of the model's "
            f"{num_layers} layers together"
        )
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def stage_of(num_layers: int, config: ParallelConfig) -> Stage:
    """What this rank computes of a model of so many layers.

    Raises: ValueError: see split_layers.
    """
    stages = split_layers(num_layers, config.pp_size, config.pp_layers)
    return Stage(
        layers=stages[config.pp_rank],
        is_first=config.pp_rank == 0,
        is_last=config.pp_rank == config.pp_size - 1,
        max_layers=max(map(len, stages)),
    )
