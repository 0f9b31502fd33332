"""Linear layers on the NPU, plain and on int8 weights, and the same per group.

Weights that only matrix products read are stored transposed, [in, out], as the operators take them:
so no Transpose stands between a weight and its operator in a graph. The quantised ones are in the
layout FRACTAL_NZ, which the matrix unit reads without rearranging; plain ones too, but for
vocabularies, of which rows are looked up.

Source: torch_npu 2.13.0, _op_plugin_docs.py: npu_grouped_matmul, npu_quant_matmul,
npu_weight_quant_batchmatmul, npu_dynamic_quant.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.packed import PackedWeight
from kernels.quantized import QuantizedWeight

FRACTAL_NZ = 29
_PLAIN = 2
_TILE = 16
_MAX_FEATURES = 65535
_MAX_GROUPS = 1024
_ROWS_OF_GROUPS = 0
_ONE_OUTPUT = 3


class NpuLinear:
    """y = x W^T + b on a weight [out, in]: torch's own product; the NPU transposes as it reads."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_nz: bool = False) -> None:
        """is_nz: in FRACTAL_NZ, if it fills that layout's tiles; then no rows can be looked up."""
        self.out_features, self.in_features = weight.shape
        fills = not (self.out_features % _TILE or self.in_features % _TILE)
        self._is_nz = is_nz and fills
        self.weight = to_nz(weight) if self._is_nz else weight
        """[out, in]."""
        self.bias = bias
        """[out]."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in_features] -> [T, out_features]."""
        return functional.linear(x, self.weight, self.bias)

    def plain(self) -> Tensor:
        """The weight [out, in] in plain order."""
        if not self._is_nz:
            return self.weight
        cast: Tensor = torch.ops.npu.npu_format_cast(self.weight, _PLAIN)
        return cast

    def packed(self) -> PackedWeight:
        """See `kernels.ops.Linear.packed`."""
        return PackedWeight.of(self.weight, self.bias)

    def rows(self, row_ids: Tensor) -> Tensor:
        """row_ids: [T] -> [T, in_features]: rows of W."""
        assert not self._is_nz, "a vocabulary is kept in plain order"
        return functional.embedding(row_ids, self.weight)


class NpuQuantizedLinear:
    """y = x W^T + b on a weight in 4 or 8 bits; activations stay as they are (W8A16, W4A16).

    The operator has W = (values + offset) * scale with values around zero.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, *, dtype: torch.dtype) -> None:
        """dtype: of x and y. See `fits` for which weights the operator takes."""
        self.out_features, self.in_features = weight.values.shape
        _check_features("linear", self.in_features, self.out_features)
        is_per_row = weight.scale.shape[1] == 1
        self._group_size = 0 if is_per_row else weight.group_size
        values, offset = weight.values.t().contiguous(), weight.offset
        shift = 8 if weight.num_bits == 4 else 0
        if shift:
            packed = torch.ops.npu.npu_convert_weight_to_int4pack((values - shift).int())
            self._weight = frozen(packed)
        else:
            self._weight = to_nz(values)
        self._scale = frozen(_factor(weight.scale, is_per_row, dtype))
        self._offset: Tensor | None = None
        if offset is not None or shift:
            steps = 0 if offset is None else offset / weight.scale
            shifted = torch.zeros_like(weight.scale) + steps + shift
            self._offset = frozen(_factor(shifted, is_per_row, dtype))
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in_features] -> [T, out_features]."""
        out: Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(
            x,
            self._weight,
            self._scale,
            self._offset,
            bias=self._bias,
            antiquant_group_size=self._group_size,
        )
        return out

    def packed(self) -> PackedWeight:
        """See `kernels.ops.Linear.packed`."""
        return PackedWeight.of(
            self._weight, self._scale, self._offset, self._bias, form=(self._group_size,)
        )

    def rows(self, row_ids: Tensor) -> Tensor:
        """A vocabulary is not quantised on the NPU. Raises: NotImplementedError: always."""
        raise NotImplementedError("rows of a quantised weight: it is stored for products")

    @staticmethod
    def fits(weight: QuantizedWeight) -> bool:
        """Whether the operator takes it: whole groups of a multiple of 32, pairs of 4 bits."""
        out_features, in_features = weight.values.shape
        is_per_row = weight.scale.shape[1] == 1
        has_groups = weight.group_size % 32 == 0 and in_features % weight.group_size == 0
        if weight.num_bits == 16:
            return False
        return (is_per_row or has_groups) and (weight.num_bits == 8 or out_features % 8 == 0)


def _factor(factor: Tensor, is_per_row: bool, dtype: torch.dtype) -> Tensor:
    """[out, groups] -> [out], or [groups, out]."""
    return (factor[:, 0] if is_per_row else factor.t().contiguous()).to(dtype)


class NpuInt8Linear:
    """y = (x W^T) * scale + b on int8 weights and int8 activations (W8A8)."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, *, dtype: torch.dtype) -> None:
        """weight: with one scale per output; dtype: of x and y."""
        self.out_features, self.in_features = weight.values.shape
        _check_features("linear", self.in_features, self.out_features)
        self._dtype = dtype
        self._weight = to_nz(weight.values.t())
        self._scale = frozen(weight.scale[:, 0].contiguous())
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, in_features] -> [T, out_features]."""
        x_int8, x_scale = torch.ops.npu.npu_dynamic_quant(x)
        out: Tensor = torch.ops.npu.npu_quant_matmul(
            x_int8,
            self._weight,
            self._scale,
            pertoken_scale=x_scale,
            bias=self._bias,
            output_dtype=self._dtype,
        )
        return out

    def packed(self) -> PackedWeight:
        """See `kernels.ops.Linear.packed`."""
        return PackedWeight.of(self._weight, self._scale, self._bias)

    def rows(self, row_ids: Tensor) -> Tensor:
        """A vocabulary is not quantised on the NPU. Raises: NotImplementedError: always."""
        raise NotImplementedError("rows of a quantised weight: it is stored for products")


class NpuGroupedLinear:
    """y = x W[g]^T for the rows of each group, in one launch."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [groups, out, in]."""
        self.num_groups, self.out_features, self.in_features = weight.shape
        _check_groups(self.num_groups)
        _check_features("grouped linear", self.in_features, self.out_features)
        self._weight = frozen(weight.transpose(1, 2).contiguous())

    def __call__(self, x: Tensor, group_sizes: Tensor) -> Tensor:
        """x: [R, in_features], sorted by group -> [R, out_features].

        group_sizes: [groups] int64. Rows past their sum are not computed: they hold anything.
        """
        out: Tensor = torch.ops.npu.npu_grouped_matmul(
            [x], [self._weight], **group_options(group_sizes)
        )[0]
        return out

    def packed(self, group: int) -> PackedWeight:
        """See `kernels.ops.GroupedLinear.packed`."""
        return PackedWeight.of(self._weight[group])


class NpuGroupedInt8Linear:
    """y = (x W[g]^T) * scale[g] on int8 weights; with int8 activations if asked (W8A8)."""

    def __init__(
        self, weight: Tensor, scale: Tensor, *, dtype: torch.dtype, quantizes_activations: bool
    ) -> None:
        """weight: [groups, out, in] int8; scale: [groups, out] float32; dtype: of x and y."""
        self.num_groups, self.out_features, self.in_features = weight.shape
        _check_groups(self.num_groups)
        _check_features("grouped linear", self.in_features, self.out_features)
        self._dtype = dtype
        self.quantizes_activations = quantizes_activations
        self.weight = to_nz(weight.transpose(1, 2))
        """[groups, in, out] int8."""
        self.float_scale = frozen(scale.float())
        """[groups, out]."""
        # bfloat16 products take scales in bfloat16, float16 products in float32.
        is_wide = quantizes_activations and dtype == torch.float16
        self._scale = self.float_scale if is_wide else frozen(scale.to(dtype))
        self._offset = frozen(torch.zeros_like(self._scale))

    def __call__(self, x: Tensor, group_sizes: Tensor) -> Tensor:
        """As NpuGroupedLinear."""
        if self.quantizes_activations:
            x_int8, x_scale = torch.ops.npu.npu_dynamic_quant(x)
            return self.of_int8(x_int8, x_scale, group_sizes)
        out: Tensor = torch.ops.npu.npu_grouped_matmul(
            [x],
            [self.weight],
            antiquant_scale=[self._scale],
            antiquant_offset=[self._offset],
            **group_options(group_sizes),
        )[0]
        return out

    def of_int8(self, x: Tensor, x_scale: Tensor, group_sizes: Tensor) -> Tensor:
        """The same of x * x_scale: x [R, in_features] int8, x_scale [R] float32 (W8A8)."""
        out: Tensor = torch.ops.npu.npu_grouped_matmul(
            [x],
            [self.weight],
            scale=[self._scale],
            per_token_scale=[x_scale],
            output_dtype=self._dtype,
            **group_options(group_sizes),
        )[0]
        return out

    def packed(self, group: int) -> PackedWeight:
        """See `kernels.ops.GroupedLinear.packed`."""
        return PackedWeight.of(self.weight[group], self.float_scale[group], self._scale[group])


def group_options(group_sizes: Tensor) -> dict[str, object]:
    """How npu_grouped_matmul is told that `group_sizes` are counts.

    Counts of a single group are not allowed; sums are, and of one number both are the same. So no
    Cumsum is computed either way.
    """
    kind = 0 if group_sizes.shape[0] == 1 else 1
    return {
        "group_list": group_sizes,
        "group_list_type": kind,
        "group_type": _ROWS_OF_GROUPS,
        "split_item": _ONE_OUTPUT,
    }


def frozen(weight: Tensor) -> Tensor:
    """The same memory as a parameter: a compiled graph need not be given its address every time."""
    return nn.Parameter(weight, requires_grad=False)


def to_nz(weight: Tensor) -> Tensor:
    """The weight in FRACTAL_NZ; shape and values stay."""
    cast: Tensor = torch.ops.npu.npu_format_cast(weight.contiguous(), FRACTAL_NZ)
    return frozen(cast)


def _check_groups(num_groups: int) -> None:
    if num_groups > _MAX_GROUPS:
        raise ValueError(f"grouped linear: {num_groups} groups, the NPU takes {_MAX_GROUPS}")


def _check_features(what: str, in_features: int, out_features: int) -> None:
    for name, value in (("in_features", in_features), ("out_features", out_features)):
        if value > _MAX_FEATURES:
            raise ValueError(f"{what}: {name} is {value}, the NPU takes {_MAX_FEATURES}")
