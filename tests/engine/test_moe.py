"""Qwen3-MoE against transformers, and the mixture of experts by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.config import parse_model_config
from engine.config import MoEConfig
from engine.errors import WeightsError
from engine.layers.layer import named_weights, pack_weights
from engine.layers.moe import MoE
from engine.parallel import Parallel
from kernels.ops import Ops
from tests.engine.family_configs import MOE_CONFIGS
from tests.engine.hf_comparison import (
    LENGTHS,
    assert_close_to_hf,
    chunks_of_five,
    prefill_then_32_steps,
    uneven,
    whole,
)
from tests.engine.tiny import from_hf, load
from tests.engine.tiny_families import tiny_family

HIDDEN_SIZE = 40


@pytest.mark.parametrize("options", MOE_CONFIGS.values(), ids=MOE_CONFIGS.keys())
def test_logits_are_those_of_transformers(
    options: dict[str, Any], ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_family("qwen3-moe", **options)
    model = from_hf(hf, tmp_path, ops)
    for take in (whole, chunks_of_five, prefill_then_32_steps, uneven()):
        assert_close_to_hf(model, hf, LENGTHS, take)


@pytest.mark.parametrize("take", [whole, prefill_then_32_steps])
def test_a_sequence_alone_has_the_logits_of_transformers(
    take: Callable[[int, int], int], ops: Ops, tmp_path: Path
) -> None:
    hf = tiny_family("qwen3-moe")
    assert_close_to_hf(from_hf(hf, tmp_path, ops), hf, (70,), take)


def test_experts_may_be_stacked_in_the_file(ops: Ops, tmp_path: Path) -> None:
    hf = tiny_family("qwen3-moe", mlp_only_layers=[1])
    hf.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if ".experts." not in n}
    tensors |= {n: p.detach() for n, p in hf.named_parameters() if ".experts." in n}
    assert "model.layers.0.mlp.experts.gate_up_proj" in tensors
    save_file(tensors, path)
    assert_close_to_hf(load(tmp_path, ops), hf, LENGTHS, whole)


def test_a_missing_expert_is_named(ops: Ops, tmp_path: Path) -> None:
    tiny_family("qwen3-moe").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(
        WeightsError, match=r"missing: model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight \[48, 64"
    ):
        load(tmp_path, ops)


def random_moe(
    ops: Ops, num_experts: int, num_experts_per_tok: int, poisoned: frozenset[int] = frozenset()
) -> MoE:
    """The same weights every time, except that those of the poisoned experts are NaN."""
    config = MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=24,
        norm_topk_prob=True,
        layers=frozenset({0}),
    )
    moe = MoE(HIDDEN_SIZE, config, ops=ops, parallel=Parallel())
    generator = torch.Generator().manual_seed(0)
    for name, weight in named_weights(moe).items():
        weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
        if name.startswith("experts.") and int(name.split(".")[1]) in poisoned:
            weight.fill_(torch.nan)
    pack_weights(moe)
    return moe


@torch.inference_mode()
def test_rows_of_nan_at_the_end_of_a_batch_leave_the_others_alone(ops: Ops) -> None:
    moe = random_moe(ops, num_experts=8, num_experts_per_tok=3)
    x = torch.randn(20, HIDDEN_SIZE)
    expected = moe(x[:13])
    x[13:] = torch.nan
    out = moe(x)
    assert expected.isfinite().all()
    torch.testing.assert_close(out[:13], expected, rtol=0, atol=1e-6)
    assert out[13:].isnan().all()
    # The same rows as a view, with nothing but NaN behind them in memory.
    torch.testing.assert_close(moe(x[:13]), expected, rtol=0, atol=1e-6)


@torch.inference_mode()
def test_a_token_has_the_same_bits_in_every_batch_on_the_cpu_kernels(ops: Ops) -> None:
    if ops.name != "cpu":
        pytest.skip("the reference's products depend on the batch")
    moe = random_moe(ops, num_experts=16, num_experts_per_tok=4)
    x = torch.randn(150, HIDDEN_SIZE)
    together = moe(x)
    assert all(torch.equal(moe(x[i : i + 1]), together[i : i + 1]) for i in range(150))
    assert torch.equal(moe(x[31:77]), together[31:77])


@torch.inference_mode()
def test_experts_that_no_token_picks_are_not_read(ops: Ops) -> None:
    x, weights = torch.randn(5, HIDDEN_SIZE), torch.rand(5, 2)
    ids = torch.tensor([[1, 3], [3, 1], [1, 6], [6, 3], [1, 3]])
    intact = random_moe(ops, 8, 2)
    poisoned = random_moe(ops, 8, 2, poisoned=frozenset({0, 2, 4, 5, 7}))
    out = poisoned.experts(x, weights, ids)
    assert torch.equal(out, intact.experts(x, weights, ids))


def as_json(**options: Any) -> dict[str, Any]:
    return (
        tiny_family("qwen3-moe").config.to_dict()
        | {"architectures": ["Qwen3MoeForCausalLM"]}
        | options
    )


def test_experts_are_counted_in_either_spelling() -> None:
    config = as_json()
    assert config.pop("num_local_experts") == 8
    for key in ("num_experts", "num_local_experts"):
        moe = parse_model_config(config | {key: 8}).moe
        assert moe is not None
        assert (moe.num_experts, moe.layers) == (8, {0, 1})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_experts_per_tok": 9}, WeightsError, "num_experts_per_tok is 9 of 8 experts"),
        ({"decoder_sparse_step": 0}, WeightsError, "decoder_sparse_step is 0"),
        ({"use_sliding_window": True}, WeightsError, "config.json has no sliding_window"),
    ],
)
def test_what_makes_no_sense_or_is_not_built_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse_model_config(as_json(**options))
