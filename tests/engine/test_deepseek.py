"""DeepSeek-V2 and V3 against transformers: latent attention, gating in groups, shared experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.config import parse_model_config
from engine.errors import UnsupportedModel, WeightsError
from kernels.ops import Ops
from tests.engine.family_configs import DEEPSEEK_CONFIGS
from tests.engine.hf_comparison import (
    LENGTHS,
    assert_close_to_hf,
    chunks_of_five,
    prefill_then_32_steps,
    uneven,
    whole,
)
from tests.engine.tiny import from_hf, load
from tests.engine.tiny_families import tiny_deepseek


@pytest.mark.parametrize(
    ("version", "options"), DEEPSEEK_CONFIGS.values(), ids=DEEPSEEK_CONFIGS.keys()
)
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
