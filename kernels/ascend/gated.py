"""The experts of one rank on int8 weights and int8 activations (W8A8), in two operators:

    rows in int8 --gate_up, swiglu, to int8 again--> --down--> rows

Source: torch_npu 2.13.0, _op_plugin_docs.py: npu_grouped_matmul_swiglu_quant_v2, npu_dynamic_quant;
CANN's page of aclnnGroupedMatmulSwigluQuantV2 for the limits. The operator's first version takes
sums of counts alone and has no form in graphs.
"""

import torch
from torch import Tensor

from kernels.ascend.linear import NpuGroupedInt8Linear, group_options

_MAX_OUT_FEATURES = 10240
_FLOAT32, _INT8 = 6, 1  # torch's numbers of its dtypes


class NpuInt8Experts:
    """Implements `kernels.experts.GatedExperts`."""

    def __init__(self, gate_up: NpuGroupedInt8Linear, down: NpuGroupedInt8Linear) -> None:
        """See `fits`."""
        self._gate_up = gate_up
        self._down = down

    @staticmethod
    def fits(gate_up: object, down: object) -> bool:
        """Whether both are for int8 activations, of a width that the operator takes."""
        return (
            isinstance(gate_up, NpuGroupedInt8Linear)
            and isinstance(down, NpuGroupedInt8Linear)
            and gate_up.quantizes_activations
            and down.quantizes_activations
            and gate_up.out_features <= _MAX_OUT_FEATURES
        )

    def __call__(self, rows: Tensor, group_sizes: Tensor) -> Tensor:
        """See `GatedExperts`."""
        in_int8, scales = torch.ops.npu.npu_dynamic_quant(rows)
        return self.of_int8(in_int8, scales, group_sizes)

    def of_int8(self, rows: Tensor, scales: Tensor, group_sizes: Tensor) -> Tensor:
        """The same of rows * scales: rows [R, H] int8, scales [R] float32.

        Raises: ValueError: other dtypes or shapes.
        """
        gate_up = self._gate_up
        if rows.dtype != torch.int8 or rows.shape[1:] != (gate_up.in_features,):
            raise ValueError(
                f"experts: rows are {list(rows.shape)} {rows.dtype}, must be "
                f"[R, {gate_up.in_features}] int8"
            )
        if scales.dtype != torch.float32 or scales.shape != rows.shape[:1]:
            raise ValueError(
                f"experts: scales are {list(scales.shape)} {scales.dtype}, must be "
                f"[{rows.shape[0]}] float32"
            )
        hidden, hidden_scales = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(
            rows,
            [gate_up.weight],
            [gate_up.float_scale],
            scales,
            group_sizes,
            dequant_dtype=_FLOAT32,
            quant_dtype=_INT8,
            group_list_type=group_options(group_sizes)["group_list_type"],
        )
        return self._down.of_int8(hidden, hidden_scales, group_sizes)
