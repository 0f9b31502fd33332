"""GGUF files: written as the gguf package does, matrices rounded to any of the file's types.

K-quants are rounded to nearest: each group of a block from its least to its greatest value, scales
and minima to the steps that the block has for them. llama.cpp searches for better ones.

Source: block_q2_K and its like in https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from gguf import quants

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_SUPER = 256
"""Values of a K-quant's block."""
# Bits of a value, values of a group, bits of its scale: with a minimum, and around zero.
_WITH_MINIMUM = {Type.Q2_K: (2, 16, 4), Type.Q4_K: (4, 32, 6), Type.Q5_K: (5, 32, 6)}
_SIGNED = {Type.Q3_K: (3, 16, 6), Type.Q6_K: (6, 16, 8)}


@contextmanager
def gguf_writer(path: Path, arch: str = "llama") -> Iterator[gguf.GGUFWriter]:
    """Takes metadata and tensors; the file is written at the end."""
    writer = gguf.GGUFWriter(path, arch)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    """What every architecture says; config: with the names of transformers."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def write_gguf(
    path: Path, config: Any, kind: Type, tensors: Iterable[tuple[str, Floats]]
) -> dict[str, Floats]:
    """A Llama with its matrices in this type, or in Q8_0 where rows are no whole blocks of it.

    config: with the names of transformers; tensors: as the file names and orders them.
    Returns the tensors that the file stands for.
    """
    kept: dict[str, Floats] = {}
    with gguf_writer(path) as writer:
        write_shape(writer, config)
        writer.add_rope_freq_base(config.rope_theta)
        for name, values in tensors:
            stored = Type.F32
            if values.ndim == 2:
                fits = values.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
                stored = kind if fits else Type.Q8_0
            data = round_to(values, stored)
            writer.add_tensor(name, data, raw_dtype=stored)
            kept[name] = quants.dequantize(data, stored)
    return kept


def round_to(values: Floats, kind: Type) -> Array:
    """values: [..., columns], of whole blocks -> the bytes of their blocks, [..., bytes]."""
    if kind not in _WITH_MINIMUM and kind not in _SIGNED:
        rounded: Array = quants.quantize(values, kind)
        return rounded
    blocks = values.reshape(-1, _SUPER)
    packed = _round_minimum(blocks, kind) if kind in _WITH_MINIMUM else _round_signed(blocks, kind)
    return packed.reshape(*values.shape[:-1], -1)


def _round_minimum(blocks: Floats, kind: Type) -> Array:
    """blocks: [n, 256]. A value is scale * q - minimum."""
    num_bits, size, scale_bits = _WITH_MINIMUM[kind]
    groups = blocks.reshape(len(blocks), -1, size)
    least = -groups.min(axis=2).clip(max=0)
    steps = (groups.max(axis=2).clip(min=0) + least) / (2**num_bits - 1)
    scale, scales = _of_block(steps, 2**scale_bits - 1)
    unit, minima = _of_block(least, 2**scale_bits - 1)
    step, shift = (scale[:, None] * scales)[..., None], (unit[:, None] * minima)[..., None]
    q = _divide(groups + shift, step).round().clip(0, 2**num_bits - 1).astype(np.uint8)
    ends = [_half_bytes(scale), _half_bytes(unit)]
    if kind == Type.Q2_K:
        return np.hstack([scales | minima << 4, _packed(q.reshape(-1, 2, 4, 32), 2), *ends])
    low = _packed((q & 15).reshape(-1, 4, 2, 32), 4)
    high = [_packed((q >> 4)[:, None], 1)] if kind == Type.Q5_K else []
    return np.hstack([*ends, _six_bits(scales, minima), *high, low])


def _round_signed(blocks: Floats, kind: Type) -> Array:
    """blocks: [n, 256]. A value is scale * q, the one farthest from zero with the lowest q."""
    num_bits, size, scale_bits = _SIGNED[kind]
    half, most = 2 ** (num_bits - 1), 2 ** (scale_bits - 1) - 1
    groups = blocks.reshape(len(blocks), -1, size)
    farthest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2)[..., None], axis=2)
    steps = -farthest[..., 0] / half
    scale, _ = _of_block(np.abs(steps), most)
    scales = _divide(steps, scale[:, None]).round().clip(-most, most).astype(np.int8)
    step = (scale[:, None] * scales)[..., None]
    q = (_divide(groups, step).round().clip(-half, half - 1) + half).astype(np.uint8)
    if kind == Type.Q3_K:
        biased = (scales + 32).astype(np.uint8)
        packed_scales = [
            _packed((biased & 15).reshape(-1, 1, 2, 8), 4),
            _packed((biased >> 4).reshape(-1, 1, 4, 4), 2),
        ]
        high = _packed((q >> 2).reshape(-1, 1, 8, 32), 1)
        low = _packed((q & 3).reshape(-1, 2, 4, 32), 2)
        return np.hstack([high, low, *packed_scales, _half_bytes(scale)])
    low = _packed((q & 15).reshape(-1, 2, 2, 64), 4)
    high = _packed((q >> 4).reshape(-1, 2, 4, 32), 2)
    return np.hstack([low, high, scales.view(np.uint8), _half_bytes(scale)])


def _of_block(factors: Floats, most: int) -> tuple[Floats, Array]:
    """factors: [n, groups], none below 0 -> [n], float16 numbers; how often they go into each."""
    unit = (factors.max(axis=1) / most).astype(np.float16).astype(np.float32)
    return unit, _divide(factors, unit[:, None]).round().clip(0, most).astype(np.uint8)


def _divide(values: Floats, by: Floats) -> Floats:
    """0 where the divisor is."""
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _packed(parts: Array, num_bits: int) -> Array:
    """parts: [n, bytes / width, parts of a byte, width], lowest bits first -> [n, bytes]."""
    shifts = num_bits * np.arange(parts.shape[-2], dtype=np.uint8)[:, None]
    packed: Array = np.bitwise_or.reduce(parts << shifts, axis=-2)
    return packed.reshape(len(parts), -1)


def _six_bits(scales: Array, minima: Array) -> Array:
    """[n, 8] each -> [n, 12]: the upper two bits of the last four are above those of the first."""
    rows = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, minima)]
    return np.hstack([*rows, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4])


def _half_bytes(factors: Floats) -> Array:
    """[n] -> [n, 2]."""
    return factors.astype(np.float16).view(np.uint8).reshape(-1, 2)
