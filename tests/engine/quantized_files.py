"""Folders of quantised safetensors, packed by each format's own rule."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.tiny import tiny_hf_llama

Packed = tuple[dict[str, Tensor], Tensor]
"""Stored tensors by the end of their names; the weight that they stand for."""
GROUP = 16


def groups_of(num_inputs: int, size: int = GROUP) -> Tensor:
    return torch.arange(num_inputs) // size


def round_to_groups(weight: Tensor, groups: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """-> values [in, out], zeros and scales [groups, out]; scales in float16."""
    num_groups = int(groups.max()) + 1
    low = torch.stack([weight[:, groups == g].amin(1) for g in range(num_groups)]).clamp_max(0)
    high = torch.stack([weight[:, groups == g].amax(1) for g in range(num_groups)]).clamp_min(0)
    scales = ((high - low) / most).half()
    zeros = (-low / scales).round().clamp(1, most).int()
    values = (weight.t() / scales[groups].float() + zeros[groups]).round().clamp(0, most).int()
    return values, zeros, scales


def words(nibbles: list[Tensor], num_bits: int) -> Tensor:
    """The i-th tensor goes to bits num_bits * i."""
    total = sum(part.long() << (num_bits * i) for i, part in enumerate(nibbles))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def pack_awq(weight: Tensor) -> Packed:
    groups = groups_of(weight.shape[1])
    values, zeros, scales = round_to_groups(weight, groups, 15)

    def pack(x: Tensor) -> Tensor:
        return words([x[:, column::8] for column in (0, 2, 4, 6, 1, 3, 5, 7)], 4)

    plain = (values - zeros[groups]).float() * scales[groups].float()
    stored = {"qweight": pack(values), "qzeros": pack(zeros), "scales": scales}
    return stored, plain.t()


def gptq(num_bits: int, stored_less: int, order: Callable[[int], Tensor]) -> Any:
    per_word = 32 // num_bits

    def pack(weight: Tensor) -> Packed:
        groups = order(weight.shape[1])
        values, zeros, scales = round_to_groups(weight, groups, 2**num_bits - 1)
        stored = {
            "qweight": words([values[i::per_word] for i in range(per_word)], num_bits),
            "qzeros": words(
                [zeros[:, i::per_word] - stored_less for i in range(per_word)], num_bits
            ),
            "scales": scales,
            "g_idx": groups.int(),
        }
        return stored, ((values - zeros[groups]).float() * scales[groups].float()).t()

    return pack


def shuffled(num_inputs: int) -> Tensor:
    order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))
    return groups_of(num_inputs)[order]


def pack_fp8(weight: Tensor) -> Packed:
    rows, columns = -(-weight.shape[0] // 24), -(-weight.shape[1] // 16)
    scale = torch.empty(rows, columns)
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    plain = torch.empty_like(weight)
    for r in range(rows):
        for c in range(columns):
            block = (slice(24 * r, 24 * r + 24), slice(16 * c, 16 * c + 16))
            scale[r, c] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scale[r, c]).to(torch.float8_e4m3fn)
            plain[block] = stored[block].float() * scale[r, c]
    return {"weight": stored, "weight_scale_inv": scale}, plain


def pack_int8(weight: Tensor) -> Packed:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scale.float()).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scale}, values * scale.float()


def pack_modelslim(weight: Tensor) -> Packed:
    stored, plain = pack_int8(weight)
    num_outputs = len(weight)
    stored |= {
        "weight_scale": stored["weight_scale"].float(),
        "weight_offset": torch.zeros(num_outputs, 1),
        "input_scale": torch.ones(1),
        "input_offset": torch.zeros(1),
        "deq_scale": torch.ones(num_outputs),
        "quant_bias": torch.zeros(num_outputs, dtype=torch.int32),
    }
    return stored, plain


W8A8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FORMATS: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any] | None, bool]] = {
    # packing, quantization_config, whether the blocks can be kept
    "awq": (pack_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}, True),
    "gptq": (
        gptq(4, 1, groups_of),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
        True,
    ),
    "gptq, second version, 8 bits": (
        gptq(8, 0, groups_of),
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": GROUP,
            "checkpoint_format": "gptq_v2",
        },
        True,
    ),
    "gptq, a scale per output": (
        gptq(4, 1, lambda n: groups_of(n, n)),
        {"quant_method": "gptq", "bits": 4, "group_size": -1},
        True,
    ),
    "gptq, desc_act": (
        gptq(4, 1, shuffled),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        False,
    ),
    "fp8": (pack_fp8, {"quant_method": "fp8", "weight_block_size": [24, 16]}, False),
    "compressed-tensors": (
        pack_int8,
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": W8A8}}},
        True,
    ),
    "modelslim": (pack_modelslim, None, True),
}


@torch.no_grad()
def write_quantized(folder: Path, name: str) -> Any:
    """A folder in that format; its model, dequantised."""
    pack, quantization_config, _ = FORMATS[name]
    hf = tiny_hf_llama()
    hf.save_pretrained(folder)
    stored, description = {}, {}
    for key, parameter in hf.named_parameters():
        if "_proj" in key:
            parts, plain = pack(parameter)
            stem = key.removesuffix(".weight")
            stored |= {f"{stem}.{kind}": part.contiguous() for kind, part in parts.items()}
            parameter.copy_(plain)
            description[key] = "W8A8"
        else:
            stored[key] = parameter.detach().clone()
            description[key] = "FLOAT"
    save_file(stored, folder / "model.safetensors")
    if quantization_config is None:
        (folder / "quant_model_description.json").write_text(json.dumps(description))
    else:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | {"quantization_config": quantization_config}
        path.write_text(json.dumps(config))
    return hf
