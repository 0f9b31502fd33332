"""Tiny random models of every family, as transformers has them."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.engine.tiny import tiny_hf, tiny_hf_llama

CLASSES: dict[str, tuple[Any, Any]] = {
    "mistral": (MistralForCausalLM, MistralConfig),
    "mixtral": (MixtralForCausalLM, MixtralConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig),
}


def tiny_family(family: str, **options: Any) -> PreTrainedModel:
    """One of CLASSES; experts are eight, of which a token gets two."""
    model_class, config_class = CLASSES[family]
    experts = {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    }
    defaults: dict[str, Any] = {"mixtral": {"num_local_experts": 8}, "qwen3-moe": experts}
    model: PreTrainedModel = tiny_hf(
        model_class, config_class, **(defaults.get(family, {}) | options)
    )
    return model


_LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_V3: dict[str, Any] = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}


def tiny_deepseek(version: str, **options: Any) -> PreTrainedModel:
    """version: v2 or v3."""
    model: PreTrainedModel
    if version == "v3":
        model = tiny_hf(DeepseekV3ForCausalLM, DeepseekV3Config, **(_LATENT | _V3 | options))
    else:
        groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        model = tiny_hf(DeepseekV2ForCausalLM, DeepseekV2Config, **(_LATENT | groups | options))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_hf_llama,
    "mistral with a window": lambda: tiny_family("mistral", sliding_window=12),
    "mixtral with a window": lambda: tiny_family("mixtral", sliding_window=12),
    "qwen2": lambda: tiny_family("qwen2"),
    "qwen3": lambda: tiny_family("qwen3", head_dim=32),
    "qwen3-moe": lambda: tiny_family("qwen3-moe"),
    "deepseek-v2": lambda: tiny_deepseek("v2", q_lora_rank=None),
    "deepseek-v3": lambda: tiny_deepseek("v3"),
}
