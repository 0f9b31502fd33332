"""Mixture of experts: each token goes through the few MLPs that its router picks."""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from engine.config import MoEConfig, Quantization
from engine.layers.layer import Shard, WeightedLayer
from engine.layers.linear import FusedLinear
from engine.layers.mlp import GatedMLP
from engine.layers.quantization import pack_grouped_linear
from engine.layers.rows import rows_of
from engine.parallel import Parallel, Span, split_evenly
from kernels.ops import GroupedLinear, Ops
from kernels.quantized import QuantizedWeight, concat_rows

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Experts(WeightedLayer):
    """down(silu(gate(x)) * up(x)) with weights per expert, on the rows routed to each.

    dispatch: rows sorted by expert -> one product per expert that has rows -> combine: weighted sum
    """

    def __init__(
        self, hidden_size: int, config: MoEConfig, *, ops: Ops, experts: range, columns: Span
    ) -> None:
        """`experts` are the ones that this rank holds, `columns` the part of their width."""
        super().__init__()
        num_experts, width = len(experts), len(columns)
        self._ops = ops
        self._experts = experts
        self._num_experts = config.num_experts
        self._columns = columns
        self._width = width
        self._gate_up_weight: Tensor | None = torch.empty(num_experts, 2 * width, hidden_size)
        self._down_weight: Tensor | None = torch.empty(num_experts, hidden_size, width)
        self._gate_up: GroupedLinear | None = None
        self._down: GroupedLinear | None = None

    @property
    def num_local_experts(self) -> int:
        """How many this rank holds."""
        return len(self._experts)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the stacked tensors, three per expert."""
        gate_up, down = self._gate_up_weight, self._down_weight
        assert gate_up is not None, "the weights are packed already"
        assert down is not None, "the weights are packed already"
        for i, expert in enumerate(self._experts):
            yield f"experts.{expert}.gate_proj.weight", gate_up[i, : self._width]
            yield f"experts.{expert}.up_proj.weight", gate_up[i, self._width :]
            yield f"experts.{expert}.down_proj.weight", down[i]

    def shards(self) -> Mapping[str, Shard]:
        """Outputs of gate and up, inputs of down."""
        if len(self._columns) == self._columns.total:
            return {}
        dims = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}
        return {
            f"experts.{expert}.{name}.weight": Shard(dim, self._columns)
            for expert in self._experts
            for name, dim in dims.items()
        }

    def elsewhere(self) -> Iterator[str]:
        """The experts of the other ranks."""
        for expert in range(self._num_experts):
            if expert not in self._experts:
                for name in _PROJECTIONS:
                    yield f"experts.{expert}.{name}.weight"

    def pack(self, quantization: Quantization) -> None:
        """Hand the weights to the backend and drop the plain ones."""
        assert self._gate_up_weight is not None, "the weights are packed already"
        assert self._down_weight is not None, "the weights are packed already"
        self._gate_up = pack_grouped_linear(self._ops, self._gate_up_weight, quantization)
        self._gate_up_weight = None
        self._down = pack_grouped_linear(self._ops, self._down_weight, quantization)
        self._down_weight = None

    def quantizable(self) -> Collection[str]:
        """All weights of all experts here."""
        return [name for name, _ in self.weights()]

    def pack_quantized(self, weights: Mapping[str, QuantizedWeight]) -> bool:
        """Hand gate and up, side by side, and down of every expert to the backend."""
        gate_up, down = [], []
        for expert in self._experts:
            own = {name: weights[f"experts.{expert}.{name}.weight"] for name in _PROJECTIONS}
            fused = concat_rows([own["gate_proj"], own["up_proj"]])
            if fused is None:
                return False
            gate_up.append(fused)
            down.append(own["down_proj"])
        self._gate_up = self._ops.grouped_quantized_linear(gate_up)
        self._down = self._ops.grouped_quantized_linear(down)
        self._gate_up_weight = self._down_weight = None
        return True

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """x: [T, hidden_size]; topk_weights, topk_ids: [T, k] -> [T, hidden_size]."""
        assert self._gate_up is not None, "the weights are not loaded"
        assert self._down is not None, "the weights are not loaded"
        rows, row_index, group_sizes = self._ops.moe_init_routing(
            x, topk_ids, self._down.num_groups
        )
        hidden = self._ops.silu_mul(self._gate_up(rows, group_sizes))
        out = self._down(hidden, group_sizes)
        return self._ops.moe_finalize_routing(out, row_index, topk_weights)


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


class MoE(nn.Module):
    """A router and its experts, in the place of an MLP.

    Source: sparsely gated experts (arXiv 1701.06538); softmax before the choice as in GShard
    (arXiv 2006.16668).
    """

    def __init__(
        self, hidden_size: int, config: MoEConfig, *, ops: Ops, parallel: Parallel
    ) -> None:
        super().__init__()
        self._ops = ops
        self._config = config
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
        self.experts = Experts(
            hidden_size,
            config,
            ops=ops,
            experts=range(config.num_experts),
            columns=split_evenly("moe intermediate_size", config.intermediate_size, parallel.tp),
        )
        self.shared_experts = (
            GatedMLP(
                hidden_size,
                config.shared_intermediate_size,
                bias=False,
                ops=ops,
                parallel=parallel,
            )
            if config.shared_intermediate_size
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden_size] -> the same; rows as they are between blocks."""
        x = self._rows.gather(x)
        out: Tensor = self.experts(x, *self._route(x))
        if self.shared_experts is not None:
            out = out + self.shared_experts.partial(x)
        return self._rows.reduce(out)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """-> topk_weights, topk_ids [T, k]."""
        router_logits = self.gate(x)
        if self._config.gating is not None:
            bias = None if self.correction is None else self.correction.bias
            return self._ops.moe_gating_topk(router_logits, self._config.gating, bias)
        topk_weights, topk_ids = self._ops.moe_gating_topk_softmax(
            router_logits, self._config.num_experts_per_tok
        )
        if self._config.norm_topk_prob:
            topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
        return topk_weights, topk_ids
