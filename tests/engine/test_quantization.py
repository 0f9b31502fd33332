"""int8 weights made at load, against transformers on the same weights dequantised."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layers.quantization import quantize_int8
from engine.models import build_model
from engine.weights import load_model_config, load_weights
from kernels.ops import Ops
from tests.engine.test_llama import LENGTHS, assert_close_to_hf, uneven, whole
from tests.engine.test_moe import tiny_moe
from tests.engine.test_qwen import tiny_qwen
from tests.engine.tiny import tiny_hf_llama

MODELS: dict[str, Any] = {
    "llama": tiny_hf_llama,
    "llama, tied, biases": lambda: tiny_hf_llama(
        tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "qwen2": lambda: tiny_qwen("qwen2"),
    "qwen3": lambda: tiny_qwen("qwen3", head_dim=16),
    "qwen3-moe": tiny_moe,
}


@torch.no_grad()
def quantize_dequantize(hf: Any) -> None:
    """Round every projection in the model itself; embeddings, head, router and norms stay."""
    for name, parameter in hf.named_parameters():
        if "_proj" in name and not name.endswith("bias"):
            values, scale = quantize_int8(parameter)
            assert values.unique().numel() > 100, "int8 is used in full"
            parameter.copy_(values * scale[..., None])


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_logits_are_those_of_the_rounded_weights(make: Any, ops: Ops, tmp_path: Path) -> None:
    hf = make()
    hf.save_pretrained(tmp_path)
    model = build_model(load_model_config(tmp_path), ops)
    load_weights(tmp_path, model, quantization="int8")
    with pytest.raises(AssertionError):  # the plain weights' logits are others
        assert_close_to_hf(model, hf, (9,), whole)
    quantize_dequantize(hf)
    for take in (whole, uneven()):
        assert_close_to_hf(model, hf, LENGTHS, take)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.floats(1e-6, 1e6))
def test_rounding_errs_by_half_a_step_at_most(seed: int, size: float) -> None:
    weight = size * torch.randn(5, 33, generator=torch.Generator().manual_seed(seed))
    values, scale = quantize_int8(weight)
    assert values.dtype == torch.int8
    assert values.abs().amax(dim=-1).eq(127).all()
    error = (values * scale[:, None] - weight).abs()
    assert (error <= 0.5001 * scale[:, None]).all()


def test_a_row_of_zeros_stays_one() -> None:
    values, scale = quantize_int8(torch.zeros(3, 8))
    assert not values.any()
    assert scale.isfinite().all()
