"""Mixture of experts: each token goes through the few MLPs that its router picks.

With ep_size above 1 the experts are dealt out over ranks; `moe_comm` says how tokens reach them:

    zero_redundancy  rows are scattered: route the own T / tp rows --dispatch--> experts
                     --combine--> the own rows. Nothing is gathered or sliced here.
    allreduce        every rank of a tensor-parallel group has all rows: slice the own T / tp,
                     dispatch and combine, AllGather
                     Either, where the plan of the step says so: AllGather, compute on the own
                     experts, ReduceScatter in the place of dispatch and combine
    allgather        within a tensor-parallel group: every rank computes all rows on its own
                     experts, AllReduce. Beyond it: slice, AllGather, compute, ReduceScatter,
                     AllGather
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.collectives import max_over
from engine.config import MoEConfig, Quantization
from engine.expert_moves import move_experts
from engine.expert_placement import ExpertPlacement
from engine.expert_planner import plan
from engine.layers.dispatch import compute_own, select_dispatch
from engine.layers.experts import Experts
from engine.layers.layer import WeightedLayer
from engine.layers.linear import FusedLinear
from engine.layers.mlp import GatedMLP
from engine.layers.rows import rows_of
from engine.parallel import Parallel
from engine.slot_table import SlotTable
from engine.split import Span, split_evenly
from kernels.experts import SharedExpert
from kernels.ops import Ops


class CorrectionBias(WeightedLayer):
    """Added to the router's scores for the choice of experts alone; keeps their loads even.

    Source: auxiliary-loss-free load balancing (arXiv 2408.15664).
    """

    def __init__(self, num_experts: int, *, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        self.bias = torch.empty(num_experts)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The bias."""
        yield "gate.e_score_correction_bias", self.bias

    def pack(self, quantization: Quantization) -> None:
        """Hand the bias to the backend."""
        self.bias = self._ops.parameter(self.bias, is_exact=True)


def _first_placement(config: MoEConfig, parallel: Parallel) -> ExpertPlacement:
    eplb = parallel.config.eplb
    is_placed = parallel.config.ep_size > 1 and eplb.mode != "off"
    num_redundant = eplb.num_redundant_experts if is_placed else 0
    if not num_redundant:
        return ExpertPlacement.contiguous(config.num_experts, parallel.ep.size)
    even = [1.0] * config.num_experts
    return plan(even, num_redundant=num_redundant, num_ranks=parallel.ep.size)


def active_rows(slot_mapping: Tensor, parallel: Parallel) -> Tensor | None:
    """Which of the rows that this rank dispatches to experts are tokens: [T / tp] bool.

    None: all are sent, as no operator takes it, or not on all ranks: those with other numbers of
    rows than the rest have to send them all. slot_mapping: [T], negative for padding, at the tail.
    """
    config = parallel.config
    if parallel.exchange is None or not parallel.exchange_rows:
        return None
    if config.cp_size > 1 or not (config.has_even_rows or parallel.step.is_even):
        return None
    count = -(-len(slot_mapping) // config.tp_size)
    first = config.tp_rank * count
    rows = torch.arange(first, first + count, dtype=torch.int32, device=slot_mapping.device)
    return rows < (slot_mapping >= 0).sum(dtype=torch.int32)


class MoE(nn.Module):
    """A router and its experts, in the place of an MLP.

    Shared experts are split like a dense MLP with ep_size 1, else as `shared_experts` says: whole
    on every rank, so that they need no collective, or split all the same.

    Source: sparsely gated experts (arXiv 1701.06538); softmax before the choice as in GShard
    (arXiv 2006.16668).
    """

    def __init__(
        self, hidden_size: int, config: MoEConfig, *, ops: Ops, parallel: Parallel
    ) -> None:
        super().__init__()
        self._ops = ops
        self._config = config
        self._parallel = parallel
        self._rows = rows_of(parallel)
        # NOTE: never quantised: another choice of experts costs more than the few bytes.
        self.gate = FusedLinear(
            hidden_size,
            {"gate": config.num_experts},
            bias=False,
            ops=ops,
            is_quantizable=False,
        )
        self.correction = (
            CorrectionBias(config.num_experts, ops=ops) if config.has_correction_bias else None
        )
        is_dealt_out = parallel.config.ep_size > 1
        self._sums_shared = is_dealt_out and parallel.config.shared_experts == "tp"
        self._hidden_size = hidden_size
        self.placement = _first_placement(config, parallel)
        """Of this layer's experts over the expert-parallel group."""
        self._slots = SlotTable(
            self.placement,
            device=ops.device,
            is_moved=parallel.config.eplb.mode == "dynamic",
        )
        self._dispatch = select_dispatch(
            parallel,
            ops,
            slots_per_rank=self.placement.slots_per_rank,
            num_experts_per_tok=config.num_experts_per_tok,
            hidden_size=hidden_size,
        )
        self.heat: Tensor | None = None
        """[num_experts] int64: rows that went to each, of this rank; None: nobody counts."""
        if is_dealt_out and parallel.config.eplb.collects_heat:
            self.heat = torch.zeros(config.num_experts, dtype=torch.int64, device=ops.device)
        self.experts = self._own_weights()
        self.shared_experts = (
            GatedMLP(
                hidden_size,
                config.shared_intermediate_size,
                bias=False,
                ops=ops,
                parallel=parallel if self._sums_shared or not is_dealt_out else Parallel(),
            )
            if config.shared_intermediate_size
            else None
        )

    def place(self, placement: ExpertPlacement) -> None:
        """Hold other experts; before the weights are loaded."""
        self.placement = placement
        self._slots.set(placement)
        self.experts = self._own_weights()

    def move(self, placement: ExpertPlacement) -> int:
        """Fetch the weights of another placement and follow it; between two steps, on all ranks.

        Returns how many experts moved between ranks.
        """
        num_moved = move_experts(self.experts, self.placement, placement, self._parallel.ep)
        self.placement = placement
        self._slots.set(placement)
        return num_moved

    def _own_weights(self) -> Experts:
        config, parallel = self._config, self._parallel
        width = config.intermediate_size
        return Experts(
            self._hidden_size,
            config,
            ops=self._ops,
            experts=self.placement.of_rank(parallel.ep.rank),
            columns=(
                Span.whole(width)
                if parallel.config.ep_size > 1
                else split_evenly("moe intermediate_size", width, parallel.tp)
            ),
        )

    def forward(self, x: Tensor, active: Tensor | None = None) -> Tensor:
        """x: [T, hidden_size] -> the same; rows as they are between blocks.

        active: see `active_rows`; other rows may come back undefined.
        """
        config = self._parallel.config
        if config.ep_size == 1:
            x = self._rows.gather(x)
            return self._rows.reduce(self._with_shared(x, self.experts(x, *self._route(x))))
        if self._sums_shared and self.shared_experts is not None:
            out: Tensor = self._routed(x, active) + self.shared_experts(x)
            return out
        return self._routed(x, active)

    def _routed(self, x: Tensor, active: Tensor | None) -> Tensor:
        """With experts over ranks: as `forward`, without shared experts that need collectives."""
        config = self._parallel.config
        if self._rows.is_scattered or (config.tp_size == 1 and config.moe_comm != "allgather"):
            return self._dispatched(x, active)
        if config.moe_comm == "allgather":
            is_within = config.tp_size % config.ep_size == 0
            return self._own_experts(x) if is_within else self._gathered(x)
        own = self._dispatched(self._own_rows(x), active)
        return self._parallel.tp.all_gather(own)[: len(x)]

    def _dispatched(self, x: Tensor, active: Tensor | None) -> Tensor:
        """Rows that no other rank of the group has -> the same rows."""
        if self._parallel.step.gathers:
            return self._with_shared(x, self._gather_scatter(x))
        topk_weights, topk_ids = self._route(x)
        self._count(topk_ids)
        slots = self._slots(topk_ids, self._parallel.ep.rank)
        mlp = None if self._sums_shared else self.shared_experts
        shared = None if mlp is None else SharedExpert(mlp.up, mlp.down)
        return self._dispatch(x, topk_weights, slots, self.experts.gated, shared, active)

    def _own_experts(self, x: Tensor) -> Tensor:
        """Rows that every rank of the group has -> the same."""
        return self._with_shared(x, self._parallel.ep.all_reduce(self._partial(x)))

    def _gathered(self, x: Tensor) -> Tensor:
        """Rows that only the tensor-parallel group has -> the same."""
        own = self._own_rows(x)
        return self._parallel.tp.all_gather(self._with_shared(own, self._gather_scatter(own)))[
            : len(x)
        ]

    def _gather_scatter(self, own: Tensor) -> Tensor:
        """Rows that no other rank of the group has -> what all experts add to them."""
        group = self._parallel.ep
        # NOTE: groups with other requests may have other numbers of rows.
        most = self._parallel.step.own_bucket(self._parallel.tp.size)
        if not most:
            (most,) = max_over(group, [len(own)])
        padded = functional.pad(own, (0, 0, 0, most - len(own)))
        return group.reduce_scatter(self._partial(group.all_gather(padded)))[: len(own)]

    def _partial(self, x: Tensor) -> Tensor:
        """What this rank's experts add to every row."""
        topk_weights, topk_ids = self._route(x)
        if self.heat is not None and self._parallel.ep.rank == 0:  # all ranks have these rows
            self._count(topk_ids[x.any(dim=1)])  # padding is zeros, and no load
        num_slots = self.placement.slots_per_rank
        return compute_own(
            x,
            topk_weights,
            self._slots(topk_ids, 0),
            self._parallel.ep.rank * num_slots,
            num_slots,
            self.experts.gated,
            self._ops,
        )

    def _count(self, topk_ids: Tensor) -> None:
        if self.heat is not None:
            ids = topk_ids.flatten().long()
            self.heat.index_add_(0, ids, torch.ones_like(ids))

    def _own_rows(self, x: Tensor) -> Tensor:
        """This rank's T / tp of the rows, padded at the tail."""
        group = self._parallel.tp
        count = -(-len(x) // group.size)
        if padding := count * group.size - len(x):
            x = functional.pad(x, (0, 0, 0, padding))
        return x[group.rank * count : (group.rank + 1) * count]

    def _with_shared(self, x: Tensor, routed: Tensor) -> Tensor:
        if self.shared_experts is None or self._sums_shared:
            return routed
        return self._ops.add(routed, self.shared_experts.partial(x))

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """-> topk_weights, topk_ids [T, k]."""
        router_logits = self.gate(x)
        if self._config.gating is not None:
            bias = None if self.correction is None else self.correction.bias
            return self._ops.moe_gating_topk(router_logits, self._config.gating, bias)
        return self._ops.moe_gating_topk_softmax(
            router_logits,
            self._config.num_experts_per_tok,
            is_normalized=self._config.norm_topk_prob,
        )
