"""GGUF's blocks of 32 and its halves as `QuantizedWeight`, with the values of dequantising them.

Source: block_q4_0 and its like in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType

from engine.weights.gguf_file import GGUFTensor
from kernels.quantized import QuantizedForm, QuantizedWeight

Array = npt.NDArray[Any]

_BLOCK = 32
# Bits of a value as kept.
_FORMS = {
    GGMLQuantizationType.Q4_0: 4,
    GGMLQuantizationType.Q4_1: 4,
    GGMLQuantizationType.Q5_0: 8,
    GGMLQuantizationType.Q5_1: 8,
    GGMLQuantizationType.Q8_0: 8,
}
_WITH_OFFSET = frozenset(
    {GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_1}
)
_HALVES = {GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}


def form_of(tensor: GGUFTensor) -> QuantizedForm | None:
    """How `read_blocks` gives it; None: it does not take it."""
    kind = tensor.quantization
    if len(tensor.shape) == 2 and kind in _HALVES:
        return QuantizedForm.of_halves(tensor.shape[1], _HALVES[kind])
    if kind not in _FORMS or len(tensor.shape) != 2:
        return None
    return QuantizedForm(_BLOCK, _FORMS[kind], kind in _WITH_OFFSET)


def read_blocks(kind: GGMLQuantizationType, blocks: Array) -> QuantizedWeight:
    """blocks: [rows, blocks, bytes of a block] -> their values, scales and offsets."""
    if kind in _HALVES:
        bits = np.ascontiguousarray(blocks).view(np.int16)[..., 0]
        return QuantizedWeight.of_halves(torch.from_numpy(bits).view(_HALVES[kind]))
    scale = _half(blocks, 0)
    offset: Array | None = None
    if kind == GGMLQuantizationType.Q8_0:
        values = blocks[..., 2:].view(np.int8)
    elif kind == GGMLQuantizationType.Q4_0:
        values, offset = _nibbles(blocks[..., 2:]), -8 * scale
    elif kind == GGMLQuantizationType.Q4_1:
        values, offset = _nibbles(blocks[..., 4:]), _half(blocks, 2)
    elif kind == GGMLQuantizationType.Q5_0:
        values = _nibbles(blocks[..., 6:]) + _fifth_bits(blocks[..., 2:6]) - 16
    else:
        values = _nibbles(blocks[..., 8:]) + _fifth_bits(blocks[..., 4:8])
        offset = _half(blocks, 2)
    flat = np.ascontiguousarray(values).reshape(len(blocks), -1)
    return QuantizedWeight(
        values=torch.from_numpy(flat),
        scale=torch.from_numpy(scale),
        offset=None if offset is None else torch.from_numpy(offset),
        group_size=_BLOCK,
        num_bits=_FORMS[kind],
    )


def _half(blocks: Array, position: int) -> Array:
    """The float16 at a byte of every block, [rows, blocks] in float32."""
    raw = np.ascontiguousarray(blocks[..., position : position + 2])
    return raw.view(np.float16)[..., 0].astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """[..., 16] bytes -> [..., 32]: the low halves of all, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1).view(np.int8)


def _fifth_bits(packed: Array) -> Array:
    """[..., 4] bytes -> [..., 32]: 16 where a value's fifth bit is set."""
    bits = np.unpackbits(packed, axis=-1, bitorder="little")
    return (bits << 4).view(np.int8)
