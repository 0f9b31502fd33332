"""How checkpoint formats pack weights of few bits, undone: plain functions of their tensors.

Source: AWQ, github.com/casper-hansen/AutoAWQ (gemm); GPTQ, github.com/AutoGPTQ/AutoGPTQ; blocks of
FP8, DeepSeek-V3 (arXiv 2412.19437), section 3.3.
"""

import torch
from torch import Tensor

from kernels.quantized import QuantizedWeight

# AWQ: where the eight outputs of a word have their four bits.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def read_awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, *, group_size: int
) -> QuantizedWeight:
    """qweight: [in, out / 8] int32; qzeros: [groups, out / 8] int32; scales: [groups, out]."""
    order = torch.tensor(_AWQ_NIBBLES)

    def outputs(packed: Tensor) -> Tensor:
        words = _unpack(packed, 4).view(len(packed), -1, 8)
        return words[:, :, order].flatten(1)

    return _grouped(outputs(qweight), outputs(qzeros), scales, group_size, 4)


def read_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    *,
    group_size: int,
    num_bits: int,
    zero_bias: int,
) -> QuantizedWeight:
    """Inputs in groups of neighbours; see `dequantize_gptq`."""
    inputs = _unpack(qweight.t(), num_bits).t()
    zeros = _unpack(qzeros, num_bits) + zero_bias
    return _grouped(inputs, zeros, scales, group_size, num_bits)


def dequantize_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor,
    *,
    num_bits: int,
    zero_bias: int,
) -> Tensor:
    """-> [out, in] float32, the group of each input given by g_idx [in].

    qweight: [in * bits / 32, out] int32; qzeros: [groups, out * bits / 32] int32; scales: [groups,
    out]. Zero points are stored less `zero_bias`: 1 in the first version of the format, 0 later.
    """
    values = _unpack(qweight.t(), num_bits).t().float()
    zeros = (_unpack(qzeros, num_bits) + zero_bias).float()
    groups = g_idx.long()
    return ((values - zeros[groups]) * scales.float()[groups]).t().contiguous()


def dequantize_blocks(
    weight: Tensor, scale_inv: Tensor, block: tuple[int, int], first: tuple[int, int] = (0, 0)
) -> Tensor:
    """weight: [out, in] float8; scale_inv: one number per block of rows x columns -> float32.

    first: where in its block the first weight is.
    """
    rows, columns = weight.shape
    spread = scale_inv.float().repeat_interleave(block[0], 0)[first[0] : first[0] + rows]
    return weight.float() * spread.repeat_interleave(block[1], 1)[:, first[1] : first[1] + columns]


def read_int8(weight: Tensor, scale: Tensor, offset: Tensor | None) -> QuantizedWeight:
    """weight: [out, in] int8; scale, offset: one number per output, or one for all.

    The number is (int8 - offset) * scale.
    """
    num_outputs, num_inputs = weight.shape
    scale = _per_output(scale, num_outputs)
    shift = None
    if offset is not None and bool(offset.any()):
        shift = -_per_output(offset, num_outputs) * scale
    return QuantizedWeight(weight, scale, shift, num_inputs, 8)


def _per_output(numbers: Tensor, num_outputs: int) -> Tensor:
    return numbers.float().reshape(-1, 1).expand(num_outputs, 1).contiguous()


def _unpack(packed: Tensor, num_bits: int) -> Tensor:
    """[rows, n] int32 -> [rows, n * 32 / bits] int32, lowest bits first."""
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    unpacked: Tensor = (packed[..., None] >> shifts) & (2**num_bits - 1)
    return unpacked.flatten(-2)


def _grouped(
    values: Tensor, zeros: Tensor, scales: Tensor, group_size: int, num_bits: int
) -> QuantizedWeight:
    """values: [in, out]; zeros, scales: [groups, out] -> the same rows first."""
    scale = scales.float().t().contiguous()
    # NOTE: exact. A zero point has 5 bits (9), a scale 11 or fewer, and float32 has 24.
    offset = -zeros.float().t() * scale
    if num_bits == 8:  # bytes are signed here
        values, offset = values - 128, offset + 128 * scale
    return QuantizedWeight(
        values.t().char().contiguous(),
        scale,
        offset.contiguous(),
        min(group_size, len(values)),
        num_bits,
    )
