"""Tiny models of every family as folders that a service loads; transformers' greedy tokens."""

import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.engine.tiny import hf_logits, tiny_hf

_TIE = 1e-3  # logits closer than this may swap
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "num_key_value_heads": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 40}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 8, "sliding_window": 40}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"head_dim": 16, **_EXPERTS}),
    "deepseek-v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        _LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config, _LATENT),
}


def write_family(folder: Path, tokenizer_folder: Path, family: str) -> Any:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder / name)
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    model_class, config_class, options = FAMILIES[family]
    hf = tiny_hf(
        model_class,
        config_class,
        vocab_size=vocab_size,
        max_position_embeddings=1024,
        eos_token_id=0,
        **options,
    )
    hf.save_pretrained(folder)
    return hf


def assert_greedy(hf: Any, prompt: list[int], output: list[int]) -> None:
    logits = hf_logits(hf, prompt + output)[len(prompt) - 1 : -1]
    chosen = logits[torch.arange(len(output)), torch.tensor(output)]
    assert (logits.amax(dim=-1) - chosen).max() < _TIE


def write_tiny_experts(folder: Path, tokenizer_folder: Path) -> Path:
    """A random Qwen3-MoE of 8 experts, with the tokenizer of another model."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder / name)
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    tiny_hf(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        vocab_size=vocab_size,
        max_position_embeddings=1024,
        eos_token_id=0,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    ).save_pretrained(folder)
    return folder
