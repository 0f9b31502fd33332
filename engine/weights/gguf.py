"""Tensors in GGUF files, as Hugging Face names and orders them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine.checkpoint.tensor_types import GGUF_ROPE_DIVISORS, check_gguf_type
from engine.config import MLAConfig, ModelConfig
from engine.errors import WeightsError
from engine.weights.gguf_blocks import form_of, read_blocks
from engine.weights.gguf_file import GGUFFile, GGUFTensor
from engine.weights.source import Index, SourceTensor
from kernels.quantized import QuantizedWeight

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

# Per architecture: projections whose rows llama.cpp's converter reorders, see `halves_from_pairs`.
_INTERLEAVED = {"llama": ("attn_q", "attn_k")}

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
# The router's bias, which is no bias of a projection.
_CORRECTION, _CORRECTION_NAME = "exp_probs_b", "mlp.gate.e_score_correction_bias"
# Of latent attention, kv_b_proj in two: [heads, kv_lora_rank, nope] and [heads, v, kv_lora_rank].
_KEYS_UP, _VALUES_UP = "attn_k_b", "attn_v_b"
# Tensors [experts, rows, columns], one part of every expert each.
_EXPERT_NAMES = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}


def gguf_tensors(file: GGUFFile, config: ModelConfig) -> list[SourceTensor]:
    """Every weight under its Hugging Face name, dequantised to float32 when read.

    Raises: UnsupportedModel: a quantisation is not supported.
        WeightsError: a tensor has a name that means nothing here.
    """
    interleaved = _INTERLEAVED.get(str(file.metadata["general.architecture"]), ())
    sources: list[SourceTensor] = []
    for tensor in file.tensors:
        if tensor.name == GGUF_ROPE_DIVISORS:
            continue
        check_gguf_type(tensor.name, tensor.quantization.name, str(file.path))
        stem, _, kind = tensor.name.rpartition(".")
        part = stem.rpartition(".")[2]
        if part in _EXPERT_NAMES:
            sources.extend(_experts(file, tensor))
            continue
        if part == _VALUES_UP:
            continue  # with _KEYS_UP
        if part == _KEYS_UP:
            sources.append(_up_projection(file, tensor, config.mla))
            continue
        order: Array | None = None
        if part in interleaved:
            order = halves_from_pairs(np.arange(tensor.shape[0]), config.head_dim)
        sources.append(_source(_hf_name(file, stem, kind), tensor, order))
    return sources


def halves_from_pairs(rows: Array, head_dim: int) -> Array:
    """Undo the row order of llama.cpp's converter: it puts the dims of a rotated pair side by side.

    rows: [heads * head_dim, ...]; within a head, pair i moves from rows (2i, 2i + 1) to rows
    (i, i + head_dim / 2).
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def dequantize(data: Array, quantization: GGMLQuantizationType) -> Floats:
    """data: bytes of whole blocks, in any shape -> their values in float32, flat."""
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    data = np.ascontiguousarray(data).reshape(-1)
    if quantization == GGMLQuantizationType.F32:
        return data.view(np.float32)
    # NOTE: gguf.quants works on 16 rows at a time. Rows of 256 blocks, whatever the tensor's own,
    # keep numpy busy and the interpreter lock free: several times faster, and threads help.
    num_blocks = len(data) // block_bytes
    head = num_blocks // 256 * 256
    parts = [data[: head * block_bytes].reshape(-1, 256 * block_bytes)]
    parts.append(data[head * block_bytes :].reshape(1, -1))
    out = np.empty(num_blocks * block_size, np.float32)
    start = 0
    for part in parts:
        if part.size:
            values = quants.dequantize(part, quantization).reshape(-1)
            out[start : start + len(values)] = values
            start += len(values)
    return out


def _source(name: str, tensor: GGUFTensor, order: Array | None = None) -> SourceTensor:
    """order: the stored rows, as the model has them; None: so they are."""

    def rows_of(index: Index) -> slice | Array:
        return index[0] if order is None else order[index[0]]

    def read(index: Index) -> Tensor:
        if len(tensor.shape) == 1:
            values = dequantize(
                tensor.blocks(slice(0, 1), slice(0, tensor.shape[0])), tensor.quantization
            )
            return torch.from_numpy(values if order is None else values[order])[index]
        columns = index[1] if len(index) == 2 else slice(0, tensor.matrix[1])
        blocks = tensor.blocks(rows_of(index), columns)
        values = dequantize(blocks, tensor.quantization).reshape(len(blocks), -1)
        skipped = columns.start % GGML_QUANT_SIZES[tensor.quantization][0]
        part = values[:, skipped : skipped + columns.stop - columns.start]
        if len(index) == 2:
            return torch.from_numpy(part)
        return torch.from_numpy(part.reshape(-1, *tensor.shape[1:]))[(slice(None), *index[1:])]

    def read_quantized(index: Index) -> QuantizedWeight:
        return read_blocks(tensor.quantization, tensor.blocks(rows_of(index), index[1]))

    return SourceTensor(name, tensor.shape, read, form_of(tensor), read_quantized)


def _experts(file: GGUFFile, tensor: GGUFTensor) -> Iterator[SourceTensor]:
    _, layer_idx, part, kind = tensor.name.split(".")
    if len(tensor.shape) != 3 or kind != "weight":
        raise WeightsError(f"{tensor.name} in {file.path} has shape {list(tensor.shape)}")
    for expert in range(tensor.shape[0]):
        name = f"model.layers.{layer_idx}.mlp.experts.{expert}.{_EXPERT_NAMES[part]}.weight"
        yield _source(name, tensor.slice_of(expert, name))


def _up_projection(file: GGUFFile, keys: GGUFTensor, mla: MLAConfig | None) -> SourceTensor:
    """kv_b_proj of latent attention: by head, what makes keys, and what makes values."""
    stem = keys.name.removesuffix(f".{_KEYS_UP}.weight")
    found = [t for t in file.tensors if t.name == f"{stem}.{_VALUES_UP}.weight"]
    if mla is None or not found:
        raise WeightsError(f"{file.path} has {keys.name}, but no {_VALUES_UP} beside it")
    num_heads, nope, width = keys.shape[0], mla.qk_nope_head_dim, mla.v_head_dim
    wanted = ((num_heads, mla.kv_lora_rank, nope), (num_heads, width, mla.kv_lora_rank))
    if (keys.shape, found[0].shape) != wanted:
        shapes = f"{list(keys.shape)} and {list(found[0].shape)}"
        raise WeightsError(f"{keys.name} and {_VALUES_UP} in {file.path} are {shapes}")
    key_source, value_source = _source("", keys), _source("", found[0])
    size = nope + width

    def read(index: Index) -> Tensor:
        rows, columns = index
        heads = slice(rows.start // size, -(-rows.stop // size))
        whole = [slice(0, length) for length in (mla.kv_lora_rank, nope, width)]
        k = key_source.read((heads, whole[0], whole[1])).transpose(1, 2)
        both = torch.cat([k, value_source.read((heads, whole[2], whole[0]))], dim=1)
        first = rows.start - heads.start * size
        return both.flatten(0, 1)[first : first + rows.stop - rows.start, columns]

    name = f"{_layer_name(file, stem)}.self_attn.kv_b_proj.weight"
    return SourceTensor(name, (num_heads * size, mla.kv_lora_rank), read)


def _hf_name(file: GGUFFile, stem: str, kind: str) -> str:
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    block, _, part = stem.rpartition(".")
    if part == _CORRECTION:
        return f"{_layer_name(file, block)}.{_CORRECTION_NAME}"
    if part not in _LAYER_NAMES:
        raise WeightsError(f"{file.path} has a tensor {stem!r} that this model does not have")
    return f"{_layer_name(file, block)}.{_LAYER_NAMES[part]}.{kind}"


def _layer_name(file: GGUFFile, block: str) -> str:
    """blk.3 -> model.layers.3"""
    kind, _, layer_idx = block.partition(".")
    if kind != "blk" or not layer_idx.isdigit():
        raise WeightsError(f"{file.path} has a tensor in {block!r} that this model does not have")
    return f"model.layers.{layer_idx}"


def with_divisors(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    """The configuration with the divisors of frequencies that the file holds, if any."""
    for tensor in file.tensors:
        if tensor.name == GGUF_ROPE_DIVISORS:
            blocks = tensor.blocks(slice(0, 1), slice(0, tensor.shape[0]))
            divisors = tuple(dequantize(blocks, tensor.quantization).tolist())
            return replace(config, rope=replace(config.rope, divisors=divisors))
    return config
