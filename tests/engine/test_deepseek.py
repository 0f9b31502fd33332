"""DeepSeek-V2 and V3 against transformers: latent attention, gating in groups, shared experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

from engine.checkpoint.config import parse_model_config
from engine.errors import UnsupportedModel, WeightsError
from kernels.ops import Ops
from tests.engine.test_llama import LENGTHS, assert_close_to_hf, chunks_of_five, uneven, whole
from tests.engine.test_moe import prefill_then_32_steps
from tests.engine.tiny import from_hf, load, tiny_hf

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
SHAPES: dict[str, Any] = {
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
V3: dict[str, Any] = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
FIVE_HEADS = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("v3", {}),
    "v3, eight groups": ("v3", {"n_routed_experts": 16, "n_group": 8, "topk_group": 3}),
    "v3, one group": ("v3", {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 5}),
    "v3 without q_lora, weights not normalised": (
        "v3",
        {"q_lora_rank": None, "norm_topk_prob": False},
    ),
    "v3, yarn with mscale": (
        "v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "v3, five heads, all sparse, two shared experts": (
        "v3",
        FIVE_HEADS | {"first_k_dense_replace": 0, "n_shared_experts": 2},
    ),
    "v3, biases, linear rope, tied": (
        "v3",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        },
    ),
    "v3, values wider than keys, all dense": (
        "v3",
        {"v_head_dim": 40, "qk_nope_head_dim": 8, "first_k_dense_replace": 2},
    ),
    "v2, greedy": ("v2", {"topk_method": "greedy"}),
    "v2, one of four groups": ("v2", {"topk_group": 1}),
    "v2, eight groups, scaled": (
        "v2",
        {"n_routed_experts": 16, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0},
    ),
    "v2 without q_lora, as Lite": (
        "v2",
        {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_shared_experts": 2,
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "v2, five heads, yarn with another mscale": (
        "v2",
        FIVE_HEADS | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "v2, one head, biases, tied": (
        "v2",
        {
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


def tiny_deepseek(version: str, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel
    if version == "v3":
        model = tiny_hf(DeepseekV3ForCausalLM, DeepseekV3Config, **(SHAPES | V3 | options))
    else:
        groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        model = tiny_hf(DeepseekV2ForCausalLM, DeepseekV2Config, **(SHAPES | groups | options))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize(("version", "options"), CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_are_those_of_transformers(
    version: str, options: dict[str, Any], ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_deepseek(version, **options)
    model = from_hf(hf, tmp_path, ops)
    for take in (whole, chunks_of_five, prefill_then_32_steps, uneven()):
        assert_close_to_hf(model, hf, LENGTHS, take)


def test_weights_for_drafts_are_no_reason_to_refuse_a_checkpoint(ops: Ops, tmp_path: Path) -> None:
    hf = tiny_deepseek("v3", num_mtp_layers=1)
    hf.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}, path)
    assert_close_to_hf(load(tmp_path, ops), hf, LENGTHS, whole)


def as_json(version: str, **options: Any) -> dict[str, Any]:
    hf = tiny_deepseek(version)
    return hf.config.to_dict() | {"architectures": [type(hf).__name__]} | options


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        ("v3", {"rope_interleave": False}, "rope_interleave is False, supported: True"),
        ("v3", {"topk_method": "greedy"}, "topk_method is 'greedy', supported: 'noaux_tc'"),
        ("v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', supported: 'sigmoid'"),
        ("v2", {"norm_topk_prob": True}, "norm_topk_prob is True, supported: False"),
        ("v2", {"topk_method": "noaux_tc"}, "supported: 'greedy', 'group_limited_greedy'"),
    ],
)
def test_a_value_that_is_not_built_is_refused(
    version: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_model_config(as_json(version, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_group": 3}, "n_routed_experts is 8, no multiple of n_group 3"),
        ({"topk_group": 5}, "topk_group is 5 of 4 groups"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, 4 experts can be chosen"),
        ({"kv_lora_rank": None}, "config.json has no kv_lora_rank"),
    ],
)
def test_values_that_contradict_each_other_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        parse_model_config(as_json("v3", **options))
