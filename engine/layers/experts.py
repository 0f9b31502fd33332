"""The weights of the experts that one rank holds."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor

from engine.config import MoEConfig, Quantization
from engine.layers.layer import Shard, WeightedLayer
from engine.layers.plain import empty_weight
from engine.layers.quantization import pack_grouped_linear
from engine.split import Span
from kernels.experts import GatedExperts
from kernels.ops import GroupedLinear, Ops
from kernels.packed import PackedWeight
from kernels.quantized import QuantizedRows, concat_rows

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Experts(WeightedLayer):
    """down(silu(gate(x)) * up(x)) with weights per expert, on the rows routed to each.

    dispatch: rows sorted by expert -> one product per expert that has rows -> combine: weighted sum
    """

    def __init__(
        self,
        hidden_size: int,
        config: MoEConfig,
        *,
        ops: Ops,
        experts: Sequence[int],
        columns: Span,
    ) -> None:
        """`experts` are the ones that this rank holds, `columns` the part of their width."""
        super().__init__()
        num_experts, width = len(experts), len(columns)
        self._ops = ops
        self._experts = experts
        self._num_experts = config.num_experts
        self._columns = columns
        self._width = width
        self._gate_up_weight: Tensor | None = empty_weight(num_experts, 2 * width, hidden_size)
        self._down_weight: Tensor | None = empty_weight(num_experts, hidden_size, width)
        self._gate_up: GroupedLinear | None = None
        self._down: GroupedLinear | None = None
        self._gated: GatedExperts | None = None

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
        self._gated = self._ops.gated_experts(self._gate_up, self._down)

    def rounding(self, quantization: Quantization) -> Quantization:
        """As it says."""
        return quantization

    def quantizable(self) -> Collection[str]:
        """All weights of all experts here."""
        return [name for name, _ in self.weights()]

    def pack_quantized(self, weights: Mapping[str, QuantizedRows]) -> bool:
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
        self._gated = self._ops.gated_experts(self._gate_up, self._down)
        self._gate_up_weight = self._down_weight = None
        return True

    def packed(self, slot: int) -> list[PackedWeight]:
        """The weights of the expert in a slot of this rank, as they lie in memory."""
        assert self._gate_up is not None, "the weights are not loaded"
        assert self._down is not None, "the weights are not loaded"
        return [self._gate_up.packed(slot), self._down.packed(slot)]

    @property
    def gated(self) -> GatedExperts:
        """What computes rows of these experts."""
        assert self._gated is not None, "the weights are not loaded"
        return self._gated

    def forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """x: [T, hidden_size]; topk_weights, topk_ids: [T, k], all here -> [T, hidden_size]."""
        rows, row_index, group_sizes = self._ops.moe_init_routing(x, topk_ids, len(self._experts))
        out = self.gated(rows, group_sizes)
        return self._ops.moe_finalize_routing(out, row_index, topk_weights)
