"""Tiny random models, equal in transformers and here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.models import CausalLM
from kernels.ops import Ops
from tests.engine.steps import (
    VOCAB_SIZE,
    PoisonedCache,
    load,
    logits_by_steps,
    make_request,
    random_token_ids,
)

__all__ = [
    "VOCAB_SIZE",
    "PoisonedCache",
    "from_hf",
    "hf_logits",
    "load",
    "logits_by_steps",
    "make_request",
    "random_token_ids",
    "tiny_hf",
    "tiny_hf_llama",
]

Model = TypeVar("Model", bound=PreTrainedModel)


def tiny_hf(
    model_class: type[Model], config_class: type[PreTrainedConfig], seed: int = 0, **options: Any
) -> Model:
    """Two layers, 64 wide; every parameter random, so that none goes unnoticed."""
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = model_class(config_class(**(defaults | options))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model


def tiny_hf_llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    return tiny_hf(LlamaForCausalLM, LlamaConfig, seed, **options)


def from_hf(hf: PreTrainedModel, folder: Path, ops: Ops) -> CausalLM:
    """The same model here, by way of its files."""
    hf.save_pretrained(folder)
    return load(folder, ops)


@torch.inference_mode()
def hf_logits(hf: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """[T, V]: logits at every token."""
    logits: Tensor = hf(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits
