"""Files about the load of experts and where they go, as JSON.

{"heat": {"3": [812, 77, ...], ...}}           tokens of every expert, by layer
{"placement": {"3": [[0, 5], [1, 0], ...]}}    experts of every rank, by layer
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.expert_placement import ExpertPlacement
from engine.expert_planner import plan

Heat = Mapping[int, Sequence[float]]
"""Tokens of every expert, by layer."""


def write_heat(path: Path, heat: Heat) -> None:
    """Replace the file at once, so that whoever reads it finds a whole one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"heat": {str(k): list(v) for k, v in heat.items()}}))
    part.replace(path)


def read_heat(path: Path) -> dict[int, list[float]]:
    """Inverse of write_heat. Raises: ValueError: it is no such file."""
    return {layer: [float(n) for n in counts] for layer, counts in _read(path, "heat").items()}


def write_placements(path: Path, placements: Mapping[int, ExpertPlacement]) -> None:
    """What `read_placements` reads."""
    layers = {
        str(layer): [list(p.of_rank(rank)) for rank in range(p.num_ranks)]
        for layer, p in placements.items()
    }
    path.write_text(json.dumps({"placement": layers}))


def read_placements(
    path: Path,
    layers: Sequence[int],
    *,
    num_experts: int,
    num_redundant: int,
    num_ranks: int,
    num_nodes: int = 1,
    num_groups: int = 1,
) -> dict[int, ExpertPlacement]:
    """The placement of these layers: as the file has it, or planned for the heat that it has.

    Raises: ValueError: the file does not fit the model or the ranks; says where. OSError.
    """
    if "heat" in _load(path):
        heat = _read(path, "heat")
        _check_layers(path, heat, layers)
        for layer in layers:
            _check_counts(path, layer, heat[layer], num_experts)
        return {
            layer: plan(
                heat[layer],
                num_redundant=num_redundant,
                num_ranks=num_ranks,
                num_nodes=num_nodes,
                num_groups=num_groups,
            )
            for layer in layers
        }
    stored = _read(path, "placement")
    _check_layers(path, stored, layers)
    per_rank = (num_experts + num_redundant) // num_ranks
    placements = {}
    for layer in layers:
        ranks = stored[layer]
        if [len(held) for held in ranks] != [per_rank] * num_ranks:
            raise ValueError(
                f"{path}: layer {layer} has {[len(held) for held in ranks]} experts by rank, "
                f"must be {per_rank} on each of {num_ranks} ranks"
            )
        try:
            placements[layer] = ExpertPlacement(
                tuple(e for held in ranks for e in held), num_experts, num_ranks
            )
        except ValueError as error:
            raise ValueError(f"{path}: layer {layer}: {error}") from None
    return placements


def _load(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(contents, dict) or not {"heat", "placement"} & contents.keys():
        raise ValueError(f'{path} has neither "heat" nor "placement"')
    return contents


def _read(path: Path, key: str) -> dict[int, list[Any]]:
    found = _load(path).get(key)
    if not isinstance(found, dict) or not all(
        str(k).isdecimal() and isinstance(v, list) for k, v in found.items()
    ):
        raise ValueError(f"{path}: {key} is not a list by layer")
    return {int(layer): values for layer, values in found.items()}


def _check_layers(path: Path, found: Mapping[int, object], layers: Sequence[int]) -> None:
    if missing := sorted(set(layers) - found.keys()):
        raise ValueError(f"{path} has no layers {missing}, the model has experts there")


def _check_counts(path: Path, layer: int, counts: Sequence[object], num_experts: int) -> None:
    if len(counts) != num_experts or not all(isinstance(n, int | float) and n >= 0 for n in counts):
        raise ValueError(f"{path}: layer {layer} needs {num_experts} numbers from 0 on")
