"""A product and the collective beside it as one operator, which overlaps the two.

Weights are in plain order: in a graph these operators take no FRACTAL_NZ, nor a bias.

Source: torch_npu 2.13.0, _op_plugin_docs.py: npu_mm_reduce_scatter_base, npu_all_gather_base_mm.
"""

import torch
from torch import Tensor

from kernels.ascend.linear import NpuLinear
from kernels.experts import ExchangeGroup

_GROUP_SIZES = (2, 4, 8, 16)
_MIN_IN_FEATURES, _MAX_IN_FEATURES = 256, 65534
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ReduceScatteredProduct:
    """x [size * n, in] -> this rank's rows of the sum over the ranks of x W^T, [n, out]."""

    def __init__(self, linear: NpuLinear, group: ExchangeGroup) -> None:
        _check_group(group)
        self._linear = linear
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """Raises: ValueError: rows that do not divide over the ranks."""
        size = self._group.size
        if x.shape[0] % size:
            raise ValueError(
                f"mm_reduce_scatter: {x.shape[0]} rows over {size} ranks, must be a multiple"
            )
        out: Tensor = torch.ops.npu.npu_mm_reduce_scatter_base(
            x.contiguous(), self._linear.weight.t(), self._group.communicator, size
        )
        return out


class GatheredProduct:
    """x [n, in], this rank's rows -> x W^T of all ranks' rows, [size * n, out]."""

    def __init__(self, linear: NpuLinear, group: ExchangeGroup) -> None:
        _check_group(group)
        self._linear = linear
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        """Gather and multiply."""
        out: Tensor = torch.ops.npu.npu_all_gather_base_mm(
            x.contiguous(),
            self._linear.weight.t(),
            self._group.communicator,
            self._group.size,
            gather_output=False,
        )[0]
        return out


def fits(linear: object) -> bool:
    """Whether the operators take it: a plain weight of 256 to 65534 inputs, without a bias."""
    return (
        isinstance(linear, NpuLinear)
        and linear.bias is None
        and linear.weight.dtype in _DTYPES
        and _MIN_IN_FEATURES <= linear.in_features <= _MAX_IN_FEATURES
    )


def _check_group(group: ExchangeGroup) -> None:
    if group.size not in _GROUP_SIZES:
        raise ValueError(
            f"fused collectives: tp is {group.size}, the NPU operators take {_GROUP_SIZES}"
        )
