"""GGUF's blocks of 32 as `QuantizedWeight`, value for value what dequantising them gives.

Source: block_q4_0 and its like in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.weights.gguf_file import GGUFTensor
from kernels.quantized import QuantizedWeight

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


def keeps(tensor: GGUFTensor) -> bool:
    """Whether `read_blocks` takes it."""
    return tensor.quantization in _FORMS and len(tensor.shape) == 2


def read_blocks(
    tensor: GGUFTensor, reorder: Callable[[Array], Array] | None = None
) -> QuantizedWeight:
    """The tensor's values, scales and offsets; `reorder` permutes rows."""
    kind = tensor.quantization
    _, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = tensor.data.reshape(tensor.shape[0], -1, block_bytes)
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
    flat = np.ascontiguousarray(values).reshape(tensor.shape)
    parts = [part if reorder is None else reorder(part) for part in (flat, scale)]
    if offset is not None:
        offset = offset if reorder is None else reorder(offset)
    return QuantizedWeight(
        values=_tensor(parts[0]),
        scale=_tensor(parts[1]),
        offset=None if offset is None else _tensor(offset),
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


def _tensor(array: Array) -> torch.Tensor:
    # The mapped file is read-only, which torch cannot express.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
