"""The packaged model's weights and configuration, for files of other formats to be made of."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from engine.weights import load_model_config
from engine.weights.gguf import dequantize, gguf_tensors
from engine.weights.gguf_file import read_gguf


def hf_config(path: Path) -> dict[str, Any]:
    """The config.json of the Llama in a .gguf file."""
    config = load_model_config(path)
    return {
        "model_type": "llama",
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": sorted(config.eos_token_ids),
        "pad_token_id": min(config.eos_token_ids),
    }


def hf_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights in a .gguf file as Hugging Face names and orders them, float32."""
    for tensor in gguf_tensors(read_gguf(path), load_model_config(path)):
        yield tensor.name, tensor.whole()


def gguf_weights(path: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The weights in a .gguf file as it names and orders them."""
    for tensor in read_gguf(path).tensors:
        rows, columns = (slice(0, size) for size in tensor.matrix)
        values = dequantize(tensor.blocks(rows, columns), tensor.quantization)
        yield tensor.name, values.reshape(tensor.shape)
