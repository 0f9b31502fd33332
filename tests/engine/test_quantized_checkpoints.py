"""Quantised safetensors, packed here by each format's own rule, against transformers on the
dequantised weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import UnsupportedModel, WeightsError
from engine.weights import load_model_config
from kernels.ops import Ops
from tests.engine.hf_comparison import LENGTHS, assert_close_to_hf, uneven, whole
from tests.engine.kept_weights import (
    assert_close_but_for_inputs,
    assert_inputs_are_rounded,
    assert_same_weights,
    with_8_bits,
)
from tests.engine.quantized_files import FORMATS, write_quantized
from tests.engine.tiny import PoisonedCache, load, logits_by_steps, random_token_ids


def logits_of(path: Path, ops: Ops, **options: Any) -> Tensor:
    model = load(path, ops, **options)
    cache = PoisonedCache(model, num_blocks=8, block_size=8)
    (logits,) = logits_by_steps(model, cache, [random_token_ids(40, 0)], lambda _, left: left)
    return logits


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantised_weights(name: str, ops: Ops, tmp_path: Path) -> None:
    hf = write_quantized(tmp_path, name)
    model = load(tmp_path, ops)
    for take in (whole, uneven()):
        assert_close_to_hf(model, hf, LENGTHS, take)


@pytest.mark.parametrize("name", [name for name, (_, _, is_kept) in FORMATS.items() if is_kept])
def test_kept_as_they_are_they_are_the_same_numbers(name: str, cpu: Ops, tmp_path: Path) -> None:
    write_quantized(tmp_path, name)
    assert_same_weights(*(load(tmp_path, cpu, quantization=q) for q in ("native", "none")))
    plain = logits_of(tmp_path, cpu)
    finer = logits_of(tmp_path, cpu, quantization="native")
    assert_close_but_for_inputs(finer, plain)
    coarser = logits_of(tmp_path, with_8_bits(), quantization="native")
    if "8 bits" in name or name in ("compressed-tensors", "modelslim"):
        assert torch.equal(coarser, finer)
    else:
        assert_close_but_for_inputs(coarser, plain, bits=8)
        assert_inputs_are_rounded(coarser, plain, bits=8)


@pytest.mark.parametrize("name", [name for name, (_, _, is_kept) in FORMATS.items() if not is_kept])
def test_what_cannot_be_kept_is_said(name: str, cpu: Ops, tmp_path: Path) -> None:
    write_quantized(tmp_path, name)
    with pytest.raises(UnsupportedModel, match="native"):
        load(tmp_path, cpu, quantization="native")


@pytest.mark.parametrize(
    ("name", "kind"), [("awq", "qzeros"), ("gptq", "scales"), ("modelslim", "weight_scale")]
)
def test_a_missing_part_is_named(name: str, kind: str, cpu: Ops, tmp_path: Path) -> None:
    write_quantized(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.1.mlp.up_proj.{kind}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"no model\.layers\.1\.mlp\.up_proj\.{kind}"):
        load(tmp_path, cpu)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("awq", "scales"),
        ("gptq", "g_idx"),
        ("fp8", "weight_scale_inv"),
        ("modelslim", "weight_scale"),
    ],
)
def test_a_part_of_another_shape_is_named_with_both_shapes(
    name: str, kind: str, cpu: Ops, tmp_path: Path
) -> None:
    write_quantized(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    full = f"model.layers.1.mlp.up_proj.{kind}"
    tensors[full] = tensors[full][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    shape = rf"\[{', '.join(map(str, tensors[full].shape))}\]"
    with pytest.raises(WeightsError, match=rf"up_proj\.{kind} has shape {shape}, must have"):
        load(tmp_path, cpu)


@pytest.mark.parametrize("fraction", [0.3, 0.99])
def test_a_truncated_file_is_named(fraction: float, cpu: Ops, tmp_path: Path) -> None:
    write_quantized(tmp_path, "awq")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(fraction * path.stat().st_size)])
    with pytest.raises(WeightsError, match=r"model\.safetensors is damaged"):
        load(tmp_path, cpu)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes', supported: fp8, awq, gptq"),
        ({"quant_method": "awq", "bits": 3}, "3 bits"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv', supported: gemm"),
        ({"quant_method": "fp8"}, "weight_block_size"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4}}},
            },
            "supported: 8, int",
        ),
    ],
)
def test_other_methods_and_settings_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_quantized(tmp_path, "awq")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": change}))
    with pytest.raises(UnsupportedModel, match=message):
        load_model_config(tmp_path)
