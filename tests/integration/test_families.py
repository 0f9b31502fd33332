"""Every model family gives transformers' tokens through a prefiller, a transfer and a decoder.

They are split over different numbers of ranks; the decoder has room for no more than the prompts.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
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

from engine.parallel_config import ParallelConfig
from tests.engine.tiny import hf_logits, tiny_hf
from tests.integration.service import Service

pytestmark = pytest.mark.multiprocess

_NUM_TOKENS = 96
_NUM_BLOCKS = 30  # all prompts fit, all outputs do not
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
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
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


def _write(folder: Path, tokenizer_folder: Path, family: str) -> Any:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder / name)
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    model_class, config_class, options = _FAMILIES[family]
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


def _assert_greedy(hf: Any, prompt: list[int], output: list[int]) -> None:
    logits = hf_logits(hf, prompt + output)[len(prompt) - 1 : -1]
    chosen = logits[torch.arange(len(output)), torch.tensor(output)]
    assert (logits.amax(dim=-1) - chosen).max() < _TIE


# KV is cut in two for one family, and joined for the next.
_TP = {family: (1, 2) if i % 2 else (2, 1) for i, family in enumerate(_FAMILIES)}


@pytest.mark.parametrize("family", _FAMILIES)
async def test_disaggregated_tokens_are_those_of_transformers(
    family: str, tiny_model: Path, tmp_path: Path
) -> None:
    prefiller, decoder = ({"parallel": ParallelConfig(tp_size=size)} for size in _TP[family])
    hf = _write(tmp_path, tiny_model, family)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, hf.config.vocab_size, (length,), generator=generator).tolist()
        for length in (33, 64, 65, 200, 330)
    ]
    with Service(
        tmp_path,
        worker={"transfer": {"transport": "memory"}},
        prefiller=prefiller,
        decoder=decoder | {"num_blocks": _NUM_BLOCKS},
    ) as service:

        def generate(prompt: list[int]) -> list[int]:
            return service.generate(prompt, max_tokens=_NUM_TOKENS, ignore_eos=True)

        async def together() -> list[list[int]]:
            return await asyncio.gather(*(asyncio.to_thread(generate, p) for p in prompts))

        outputs = await together()
        (prefiller,) = service.of_role("prefiller")
        num_transfers = sum(peer.num_transfers for peer in prefiller.stats().transfers)
        assert num_transfers == len(prompts) * _TP[family][1], "one to every rank of the decoder"
        assert await together() == outputs, "a warm prefix cache changed tokens"
        (stats,) = (worker.stats() for worker in service.of_role("decoder"))
        assert stats.num_preemptions > 0
        assert stats.prefix_cache_hits > 0
        service.assert_idle()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == _NUM_TOKENS
        _assert_greedy(hf, prompt, output)
