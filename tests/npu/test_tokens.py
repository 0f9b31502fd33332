"""The NPU's code path gives the reference's tokens, on kernels that compute what the NPU's say."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.npu.simulated_experts  # noqa: F401  (and the simulator, which it imports)
from engine.batch import KVBatch
from engine.config import Quantization
from engine.worker.weights_name import weights_name
from kernels.quantized import QuantizedRows, whole
from kernels.reference import ReferenceOps
from tests.npu.families import CONFIGS, caches, family, generate
from tests.npu.tokens import npu_ops, prompts

NUM_TOKENS = 33  # one by the prefill, 32 by decode steps
ALL_EXPERTS = {
    "qwen3_moe": {"num_experts_per_tok": 8},
    "deepseek_v3": {"num_experts_per_tok": 16, "topk_group": 4},
}
PREFIX = [(7 * i) % 93 + 3 for i in range(256)]


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_32_decode_steps_give_the_tokens_of_the_reference(name: str) -> None:
    lengths = prompts(1, 5, 126, 200, 17)
    expected, expected_logits = generate(family(name, ReferenceOps()), lengths, NUM_TOKENS)
    tokens, logits = generate(family(name, npu_ops()), lengths, NUM_TOKENS)
    assert tokens == expected
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shared_prefix_gives_the_tokens_of_the_reference(name: str) -> None:
    lengths = [PREFIX + prompt for prompt in prompts(3, 40, 130)]
    expected, _ = generate(family(name, ReferenceOps()), lengths, 8)
    tokens, _ = generate(family(name, npu_ops()), lengths, 8, num_cached=len(PREFIX))
    assert tokens == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sequence_has_the_same_tokens_alone_and_in_a_batch(name: str) -> None:
    model = family(name, npu_ops())
    together, _ = generate(model, prompts(5, 150, 33), 8)
    alone = [generate(model, [prompt], 8)[0][0] for prompt in prompts(5, 150, 33)]
    assert alone == together


@pytest.mark.parametrize("window", [1, 40, 1000])
def test_a_sliding_window_gives_the_tokens_of_the_reference(window: int) -> None:
    # The second layer has one; prompts longer and shorter than it, and one behind a shared prefix.
    options = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": window}
    lengths = [PREFIX[:128] + prompt for prompt in prompts(1, 12, 130)]
    expected, _ = generate(family("qwen3", ReferenceOps(), **options), lengths, 12)
    tokens, _ = generate(family("qwen3", npu_ops(), **options), lengths, 12, num_cached=128)
    assert tokens == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_weights_give_the_tokens_of_the_reference(name: str, quantization: str) -> None:
    lengths = prompts(9, 130)
    expected, expected_logits = generate(family(name, ReferenceOps(), quantization), lengths, 16)
    tokens, logits = generate(family(name, npu_ops(), quantization), lengths, 16)
    assert tokens == expected
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-3)


class RoundedInputs(ReferenceOps):
    """int8 weights on activations that are rounded to 127 steps of each token's largest."""

    def quantized_linear(self, weight: QuantizedRows, bias: Tensor | None) -> Any:
        return Rounded(super().quantized_linear(weight, bias))

    def quantized_vocabulary(self, weight: QuantizedRows) -> Any:
        return self.linear(whole(weight).dequantize(), None)

    def grouped_quantized_linear(self, weights: Sequence[QuantizedRows]) -> Any:
        return Rounded(super().grouped_quantized_linear(weights), len(weights))


class Rounded:
    def __init__(self, linear: Any, num_groups: int = 0) -> None:
        self.linear = linear
        self.num_groups = num_groups

    def __call__(self, x: Tensor, *group_sizes: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True) / 127
        out: Tensor = self.linear((x / step).round() * step, *group_sizes)
        return out


@pytest.mark.parametrize("name", CONFIGS)
def test_int8_activations_give_the_tokens_of_rounded_ones(name: str) -> None:
    lengths = prompts(9, 130)
    expected, _ = generate(family(name, RoundedInputs(), "int8"), lengths, 16)
    w8a8 = npu_ops(quantize_activations=True)
    tokens, _ = generate(family(name, w8a8, "int8"), lengths, 16)
    assert tokens == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_int8_activations_stay_close_to_float_ones(name: str) -> None:
    # Rounding adds about 1 % to each product, averaged out in sums; two layers of random weights
    # make up to 8 % of it. Every expert is chosen, since rounding may well swap two of random ones,
    # and one step is compared, since later ones may follow another token.
    lengths = prompts(9, 130)
    options = ALL_EXPERTS.get(name, {})
    _, expected = generate(family(name, npu_ops(), "int8", **options), lengths, 1)
    w8a8 = npu_ops(quantize_activations=True)
    _, logits = generate(family(name, w8a8, "int8", **options), lengths, 1)
    assert 0 < (logits - expected).norm() / expected.norm() < 0.1


def test_kv_is_named_by_the_activations_that_int8_weights_meet() -> None:
    w8a8 = npu_ops(quantize_activations=True)
    kinds: tuple[Quantization, ...] = ("none", "auto", "int8", "int4")
    names = {kind: weights_name(kind, w8a8) for kind in kinds}
    assert names == {
        "none": "none",
        "auto": "none",
        "int8": "int8, activations of 8",
        "int4": "int4",
    }
    assert weights_name("int8", npu_ops()) == "int8"


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_an_int8_cache_gives_the_tokens_of_the_reference(name: str) -> None:
    lengths = [PREFIX + prompt for prompt in prompts(3, 40, 130)]
    options: dict[str, Any] = {"num_cached": len(PREFIX), "cache_dtype": "int8"}
    expected, expected_logits = generate(family(name, ReferenceOps()), lengths, 16, **options)
    tokens, logits = generate(family(name, npu_ops()), lengths, 16, **options)
    assert tokens == expected
    # An element near a half may be rounded to either side: a step of 1/127 of its row.
    torch.testing.assert_close(logits, expected_logits, rtol=1e-3, atol=5e-2)


def test_latents_in_int8_are_refused_with_the_operator_that_does_not_take_them() -> None:
    with pytest.raises(ValueError, match="npu_fused_infer_attention_score_v2 takes latents"):
        npu_ops().check_int8_cache(is_latent=True)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3"])
def test_a_token_without_a_slot_is_written_to_the_spare_block_alone(name: str) -> None:
    ops = npu_ops()
    model = family(name, ops)
    made = caches(model, num_blocks=3)
    kv = KVBatch(
        k_caches=made.k,
        v_caches=made.v,
        slot_mapping=torch.tensor([130, -1, -1], dtype=torch.int32),
        block_table=torch.tensor([[1], [0], [0]], dtype=torch.int32),
        cu_seqlens_q=torch.arange(4, dtype=torch.int32),
        context_lens=torch.tensor([3, 0, 0], dtype=torch.int32),
        max_seqlen_q=1,
        num_decode_seqs=3,
        num_decode_tokens=3,
    )
    for cache in made.k + made.v:
        cache[1, :, :2] = 1.0
    hidden = model(torch.tensor([5, 1, 1]), torch.tensor([2, 0, 0]), kv)
    assert hidden[0].isfinite().all()
    for cache in made.k + made.v:
        assert cache[1, :, :3].isfinite().all()
        cache[1, :, :3] = torch.nan
        assert cache[:3].isnan().all()
    assert made.k[0][3].isfinite().any()
