"""Models in GGUF files: metadata as a `ModelConfig`, tensors as Hugging Face has them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine.architectures import GGUF_ARCHITECTURES
from engine.config import ModelConfig, MoEConfig, RopeConfig, RopeType
from engine.errors import UnsupportedModel, WeightsError
from engine.models.config import SPARSE
from engine.models.rope_config import yarn_attention_factor
from engine.weights.gguf_blocks import keeps, read_blocks
from engine.weights.gguf_file import GGUFFile, GGUFTensor, Value
from engine.weights.source import SourceTensor
from kernels.quantized import QuantizedWeight

Floats = npt.NDArray[np.float32]
Reorder = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
"""Permutes rows."""

# Per architecture: projections whose rows llama.cpp's converter reorders, see `halves_from_pairs`.
_INTERLEAVED = {"llama": ("attn_q", "attn_k")}
_ROPE_TYPES: dict[str, RopeType] = {"none": "default", "linear": "linear", "yarn": "yarn"}
_QUANTIZATIONS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
_K_QUANTIZATIONS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
SUPPORTED = _QUANTIZATIONS + _K_QUANTIZATIONS

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
}
# Tensors [experts, rows, columns], one part of every expert each.
_EXPERT_NAMES = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
# Stretches each frequency (Llama 3's scaling, worked out): part of the rope parameters, no weight.
_ROPE_DIVISORS = "rope_freqs.weight"


def gguf_model_config(file: GGUFFile) -> ModelConfig:
    """Read the metadata.

    Raises: UnsupportedModel: the architecture or rope type is not built.
        WeightsError: a value is missing.
    """
    architecture = _text(file, "general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        supported = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise UnsupportedModel(
            f"general.architecture is {architecture!r} in {file.path}, supported: {supported}"
        )
    if (num_files := file.metadata.get("split.count", 1)) not in (0, 1):
        raise UnsupportedModel(f"{file.path} is one of {num_files} files; merge them first")
    number = partial(_number, file, architecture)
    hidden_size, num_heads = int(number("embedding_length")), int(number("attention.head_count"))
    head_dim = int(number("attention.key_length", hidden_size // num_heads))
    if (rope_dim := int(number("rope.dimension_count", head_dim))) != head_dim:
        raise UnsupportedModel(f"rope.dimension_count is {rope_dim}, head_dim {head_dim}")
    context_length = int(number("context_length"))
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    if "token_embd.weight" not in shapes:
        raise WeightsError(f"{file.path} has no tensor token_embd.weight")
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=GGUF_ARCHITECTURES[architecture],
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=int(number("feed_forward_length")),
        num_layers=int(number("block_count")),
        num_heads=num_heads,
        num_kv_heads=int(number("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        rms_norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        rope=_rope_config(file, architecture, context_length),
        max_position_embeddings=context_length,
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        moe=_moe_config(file, architecture),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=_eos_token_ids(file),
        dtype="gguf",
    )


def gguf_tensors(file: GGUFFile, config: ModelConfig) -> list[SourceTensor]:
    """Every weight under its Hugging Face name, dequantised to float32 when read.

    Raises: UnsupportedModel: a quantisation is not supported.
        WeightsError: a tensor has a name that means nothing here.
    """
    interleaved = _INTERLEAVED.get(_text(file, "general.architecture"), ())
    sources: list[SourceTensor] = []
    for tensor in file.tensors:
        if tensor.name == _ROPE_DIVISORS:
            continue
        if tensor.quantization.name not in SUPPORTED:
            raise UnsupportedModel(
                f"tensor {tensor.name} in {file.path} is {tensor.quantization.name}, "
                f"supported: {', '.join(SUPPORTED)}"
            )
        stem, _, kind = tensor.name.rpartition(".")
        if stem.rpartition(".")[2] in _EXPERT_NAMES:
            sources.extend(_experts(file, tensor))
            continue
        reorder: Reorder | None = None
        if stem.rpartition(".")[2] in interleaved:
            reorder = partial(halves_from_pairs, head_dim=config.head_dim)
        sources.append(
            SourceTensor(
                name=f"{_hf_name(file, stem)}.{kind}",
                shape=tensor.shape,
                read=partial(_read, tensor, reorder),
                read_part=None if reorder else partial(_read_part, tensor),
                read_quantized=_reader_quantized(tensor, reorder),
            )
        )
    return sources


def halves_from_pairs(rows: npt.NDArray[Any], head_dim: int) -> npt.NDArray[Any]:
    """Undo the row order of llama.cpp's converter: it puts the dims of a rotated pair side by side.

    rows: [heads * head_dim, ...]; within a head, pair i moves from rows (2i, 2i + 1) to rows
    (i, i + head_dim / 2).
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def dequantize(tensor: GGUFTensor) -> Floats:
    """The tensor's values in float32."""
    block_size, block_bytes = GGML_QUANT_SIZES[tensor.quantization]
    if tensor.quantization == GGMLQuantizationType.F32:
        return tensor.data.view(np.float32).reshape(tensor.shape)
    # NOTE: gguf.quants works on 16 rows at a time. Rows of 256 blocks, whatever the tensor's own,
    # keep numpy busy and the interpreter lock free: several times faster, and threads help.
    num_blocks = len(tensor.data) // block_bytes
    head = num_blocks // 256 * 256
    parts = [tensor.data[: head * block_bytes].reshape(-1, 256 * block_bytes)]
    parts.append(tensor.data[head * block_bytes :].reshape(1, -1))
    out = np.empty(num_blocks * block_size, np.float32)
    start = 0
    for part in parts:
        if part.size:
            values = quants.dequantize(part, tensor.quantization).reshape(-1)
            out[start : start + len(values)] = values
            start += len(values)
    return out.reshape(tensor.shape)


def _read(tensor: GGUFTensor, reorder: Reorder | None) -> Tensor:
    values = dequantize(tensor)
    if reorder is not None:
        values = reorder(values)
    # torch cannot express that the mapped file is read-only, so it gets a copy of that.
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _read_part(tensor: GGUFTensor, index: Sequence[slice]) -> Tensor:
    """Only the rows asked for are dequantised."""
    rows, *others = index
    data = tensor.data.reshape(tensor.shape[0], -1)[rows].reshape(-1)
    shape = (rows.stop - rows.start, *tensor.shape[1:])
    part = GGUFTensor(tensor.name, shape, tensor.quantization, data)
    return _read(part, None)[(slice(None), *others)]


def _reader_quantized(
    tensor: GGUFTensor, reorder: Reorder | None
) -> Callable[[], QuantizedWeight] | None:
    if not keeps(tensor):
        return None
    return partial(read_blocks, tensor, reorder)


def _experts(file: GGUFFile, tensor: GGUFTensor) -> Iterator[SourceTensor]:
    _, layer_idx, part, kind = tensor.name.split(".")
    if len(tensor.shape) != 3 or kind != "weight":
        raise WeightsError(f"{tensor.name} in {file.path} has shape {list(tensor.shape)}")
    num_experts, *shape = tensor.shape
    num_bytes = len(tensor.data) // num_experts
    for expert in range(num_experts):
        name = f"model.layers.{layer_idx}.mlp.experts.{expert}.{_EXPERT_NAMES[part]}.weight"
        data = tensor.data[expert * num_bytes : (expert + 1) * num_bytes]
        own = GGUFTensor(name, tuple(shape), tensor.quantization, data)
        yield SourceTensor(
            name,
            own.shape,
            partial(_read, own, None),
            partial(_read_part, own),
            read_quantized=_reader_quantized(own, None),
        )


def _hf_name(file: GGUFFile, stem: str) -> str:
    if stem in _TOP_NAMES:
        return _TOP_NAMES[stem]
    block, _, rest = stem.partition(".")
    layer_idx, _, part = rest.partition(".")
    if block != "blk" or part not in _LAYER_NAMES:
        raise WeightsError(f"{file.path} has a tensor {stem!r} that this model does not have")
    return f"model.layers.{layer_idx}.{_LAYER_NAMES[part]}"


def _moe_config(file: GGUFFile, architecture: str) -> MoEConfig | None:
    if GGUF_ARCHITECTURES[architecture] not in SPARSE:
        return None
    number = partial(_number, file, architecture)
    num_experts, k = int(number("expert_count")), int(number("expert_used_count"))
    if not 1 <= k <= num_experts:
        raise WeightsError(f"{file.path} uses {k} of {num_experts} experts")
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=k,
        intermediate_size=int(number("expert_feed_forward_length")),
        # The format knows neither models without normalisation nor dense layers in qwen3moe.
        norm_topk_prob=True,
        layers=frozenset(range(int(number("block_count")))),
    )


def _rope_config(file: GGUFFile, architecture: str, context_length: int) -> RopeConfig:
    number = partial(_number, file, architecture)
    scaling = str(file.metadata.get(f"{architecture}.rope.scaling.type", "none"))
    if scaling not in _ROPE_TYPES:
        raise UnsupportedModel(
            f"rope.scaling.type is {scaling!r} in {file.path}, supported: {', '.join(_ROPE_TYPES)}"
        )
    factor = float(number("rope.scaling.factor", 1.0))
    attention_factor = 1.0
    if scaling == "yarn":
        extra = float(number("rope.scaling.attn_factor", 1.0))
        attention_factor = extra * yarn_attention_factor(factor)
    divisors = [t for t in file.tensors if t.name == _ROPE_DIVISORS]
    return RopeConfig(
        rope_type=_ROPE_TYPES[scaling],
        theta=float(number("rope.freq_base", 10000.0)),
        factor=factor,
        original_max_position_embeddings=int(
            number("rope.scaling.original_context_length", context_length)
        ),
        attention_factor=attention_factor,
        divisors=tuple(dequantize(divisors[0]).tolist()) if divisors else (),
    )


def _eos_token_ids(file: GGUFFile) -> frozenset[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    values = (file.metadata.get(key) for key in keys)
    return frozenset(value for value in values if isinstance(value, int))


def _text(file: GGUFFile, key: str) -> str:
    value = file.metadata.get(key)
    if not isinstance(value, str):
        raise WeightsError(f"{file.path} has no text {key}")
    return value


def _number(file: GGUFFile, architecture: str, key: str, default: float | None = None) -> float:
    value: Value | None = file.metadata.get(f"{architecture}.{key}", default)
    if not isinstance(value, int | float):
        raise WeightsError(f"{file.path} has no number {architecture}.{key}")
    return value
