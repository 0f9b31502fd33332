"""Moves experts between ranks while an engine serves, so that ranks get equal loads.

    every interval_steps: sum the heat over the ranks --> for each layer, one in every step:
    plan --> move weights --> follow the new map

Each rank counts its own forward passes, of which all ranks of an engine run the same ones, and
plans for itself: no rank has to tell another. Weights and map of a layer change between two steps,
on all ranks; a step costs at most the move of one layer more.
"""

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import MoEConfig
from engine.expert_files import Heat, read_placements, write_heat
from engine.expert_moves import can_move
from engine.expert_planner import check_slots, imbalance, near, plan
from engine.layers.moe import MoE
from engine.parallel import Parallel

# A plan that cools the hottest rank by less is not worth its moves.
_MIN_GAIN = 0.03

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class BalanceStats:
    """What was done; written by the engine's loop."""

    num_looks: int = 0
    """Times that the load was looked at."""
    num_moved_experts: int = 0
    """Copies of experts that changed their rank, of all layers."""
    imbalance: float = 0.0
    """At the last look: tokens of the hottest rank over the mean, mean over layers; 0: none yet."""


class ExpertBalancer:
    """Of the sparse layers of one rank."""

    def __init__(self, layers: Mapping[int, MoE], config: MoEConfig, parallel: Parallel) -> None:
        """Give the layers their first placement; before their weights are loaded.

        Raises: ValueError: the settings do not fit the model or the ranks. OSError: no such file.
        """
        eplb = parallel.config.eplb
        self.stats = BalanceStats()
        self._layers = dict(layers)
        self._config = config
        self._group = parallel.ep
        self._eplb = eplb
        self._num_groups = 1 if config.gating is None else config.gating.num_groups
        self._num_steps = 0
        self._left: deque[tuple[int, list[float]]] = deque()
        self._fixed: set[int] | None = None
        self._writes_heat = bool(eplb.heat_file) and parallel.config.rank == 0
        check_slots(config.num_experts, eplb.num_redundant_experts, self._group.size)
        if problem := eplb.problem(self._group.size):
            raise ValueError(problem)
        if self._writes_heat:
            eplb.check_heat_file()
        if eplb.mode != "off" and eplb.file:
            self._place(Path(eplb.file))

    def before_step(self) -> None:
        """Call before every forward pass, on every rank."""
        if self._left:
            self._balance(*self._left.popleft())
            return
        self._num_steps += 1
        if self._eplb.collects_heat and self._num_steps % self._eplb.interval_steps == 0:
            self._look()

    def _place(self, path: Path) -> None:
        eplb = self._eplb
        placements = read_placements(
            path,
            list(self._layers),
            num_experts=self._config.num_experts,
            num_redundant=eplb.num_redundant_experts,
            num_ranks=self._group.size,
            num_nodes=eplb.num_nodes,
            num_groups=self._num_groups,
        )
        for layer, placement in placements.items():
            self._layers[layer].place(placement)

    def _look(self) -> None:
        heat = self._take_heat()
        self.stats.num_looks += 1
        ratios = [imbalance(heat[i], moe.placement) for i, moe in self._layers.items()]
        self.stats.imbalance = sum(ratios) / len(ratios)
        if self._writes_heat:
            self._write(heat)
        if self._eplb.mode != "dynamic":
            return
        if self._group.rank == 0:
            _log.info("experts: the hottest rank has %.2f times the mean", self.stats.imbalance)
        if self._fixed is None:
            self._fixed = self._find_fixed()
        self._left.extend((i, list(heat[i])) for i in self._layers if i not in self._fixed)

    def _write(self, heat: Heat) -> None:
        try:
            write_heat(Path(self._eplb.heat_file), heat)
        except OSError as error:  # such as a full disk; requests are not to suffer from it
            _log.warning("eplb.heat_file could not be written: %s", error)

    def _take_heat(self) -> Heat:
        """Of all ranks, since the last look."""
        own = [moe.heat for moe in self._layers.values() if moe.heat is not None]
        total = self._group.all_reduce(torch.stack(own))
        for counts in own:
            counts.zero_()
        return dict(zip(self._layers, total.tolist(), strict=True))

    def _find_fixed(self) -> set[int]:
        """Layers whose weights are packed in several forms: they cannot take each other's place."""
        fixed = {
            i
            for i, moe in self._layers.items()
            if not can_move(moe.experts, moe.placement.slots_per_rank, self._group)
        }
        if fixed:
            _log.warning("experts of layers %s stay: quantised in several forms", sorted(fixed))
        return fixed

    def _balance(self, layer: int, load: list[float]) -> None:
        moe, eplb = self._layers[layer], self._eplb
        wanted = plan(
            load,
            num_redundant=eplb.num_redundant_experts,
            num_ranks=self._group.size,
            num_nodes=eplb.num_nodes,
            num_groups=self._num_groups,
        )
        before = imbalance(load, moe.placement)
        if imbalance(load, wanted) > before - _MIN_GAIN:
            return
        self.stats.num_moved_experts += moe.move(near(wanted, moe.placement, eplb.num_nodes))
