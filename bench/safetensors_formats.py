"""Model folders whose weights are in any format: each weight rounded to nearest and packed, by the
format's own rule.

Source: see engine.weights.packing, of which this shares nothing.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
"""Stored tensors by the end of their names; the weight [out, in] that they stand for, float32."""
Pack = Callable[[Tensor], Packed]
"""Takes a weight [out, in]."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FP8_MAX = 448.0


def groups_of(num_inputs: int, size: int) -> Tensor:
    """The group of each input: `size` neighbours share one."""
    return torch.arange(num_inputs) // size


def pack_floats(weight: Tensor, dtype: torch.dtype) -> Packed:
    """As they are, in a floating type."""
    stored = weight.to(dtype)
    return {"weight": stored}, stored.float()


def pack_awq(weight: Tensor, group_size: int) -> Packed:
    """Four bits, outputs side by side."""
    groups = groups_of(weight.shape[1], group_size)
    values, zeros, scales = _round_to_groups(weight, groups, 15)

    def pack(x: Tensor) -> Tensor:
        return _words([x[:, column::8] for column in _AWQ_ORDER], 4)

    stored = {"qweight": pack(values), "qzeros": pack(zeros), "scales": scales}
    return stored, _from_groups(values, zeros, scales, groups)


def pack_gptq(
    weight: Tensor, num_bits: int, stored_less: int, groups_of_inputs: Callable[[int], Tensor]
) -> Packed:
    """Inputs side by side; zero points are stored less `stored_less`."""
    per_word, groups = 32 // num_bits, groups_of_inputs(weight.shape[1])
    values, zeros, scales = _round_to_groups(weight, groups, 2**num_bits - 1)
    stored = {
        "qweight": _words([values[i::per_word] for i in range(per_word)], num_bits),
        "qzeros": _words([zeros[:, i::per_word] - stored_less for i in range(per_word)], num_bits),
        "scales": scales,
        "g_idx": groups.int(),
    }
    return stored, _from_groups(values, zeros, scales, groups)


def pack_fp8(weight: Tensor, block: tuple[int, int]) -> Packed:
    """float8_e4m3, a scale for rows x columns."""
    num_rows, num_columns = weight.shape
    grid = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1])
    padded[:num_rows, :num_columns] = weight
    tiles = padded.view(grid[0], block[0], grid[1], block[1])
    scale = (tiles.abs().amax((1, 3)) / _FP8_MAX).clamp_min(1e-30)
    stored = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    plain = (stored.float() * scale[:, None, :, None]).view(padded.shape)
    own = (slice(num_rows), slice(num_columns))
    return {
        "weight": stored.view(padded.shape)[own].contiguous(),
        "weight_scale_inv": scale,
    }, plain[own].contiguous()


def pack_int8(weight: Tensor) -> Packed:
    """Eight bits, a scale per output."""
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scale.float()).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scale}, values * scale.float()


W8A8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": W8A8}},
}


@dataclass(frozen=True, slots=True)
class FolderFormat:
    """How a model folder holds its projections; the rest is in `rest`."""

    pack: Pack
    quantization_config: Mapping[str, Any] | None = None
    """None: all matrices are in this format."""
    rest: torch.dtype = torch.bfloat16


def folder_formats(group_size: int) -> dict[str, FolderFormat]:
    """By name. group_size: inputs that share a scale in AWQ and GPTQ."""
    in_order = partial(groups_of, size=group_size)
    gptq = {"quant_method": "gptq", "group_size": group_size}
    return {
        "float32": FolderFormat(partial(pack_floats, dtype=torch.float32), rest=torch.float32),
        "bfloat16": FolderFormat(partial(pack_floats, dtype=torch.bfloat16)),
        "float16": FolderFormat(partial(pack_floats, dtype=torch.float16), rest=torch.float16),
        "AWQ": FolderFormat(
            partial(pack_awq, group_size=group_size),
            {"quant_method": "awq", "bits": 4, "group_size": group_size},
        ),
        "GPTQ": FolderFormat(
            partial(pack_gptq, num_bits=4, stored_less=1, groups_of_inputs=in_order),
            gptq | {"bits": 4},
        ),
        "GPTQ, 8 bits": FolderFormat(
            partial(pack_gptq, num_bits=8, stored_less=1, groups_of_inputs=in_order),
            gptq | {"bits": 8},
        ),
        "W8A8": FolderFormat(pack_int8, COMPRESSED),
        "FP8": FolderFormat(
            partial(pack_fp8, block=(128, 128)),
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
        ),
    }


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    form: FolderFormat,
    weights: Iterable[tuple[str, Tensor]],
) -> dict[str, Tensor]:
    """config.json and weights by their Hugging Face names; returns what these stand for."""
    stored: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    for name, weight in weights:
        if weight.dim() == 2 and (form.quantization_config is None or "_proj." in name):
            parts, kept[name] = form.pack(weight)
            stem = name.removesuffix(".weight")
            stored |= {f"{stem}.{kind}": part.contiguous() for kind, part in parts.items()}
        else:
            stored[name] = weight.to(form.rest)
            kept[name] = stored[name].float()
    save_file(stored, folder / "model.safetensors")
    values = dict(config)
    if form.quantization_config is not None:
        values["quantization_config"] = form.quantization_config
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    return kept


def _round_to_groups(weight: Tensor, groups: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """groups: [in], as many inputs in each -> values [in, out], zeros, scales [groups, out].

    Scales are float16.
    """
    order = groups.argsort(stable=True)
    parts = weight[:, order].view(len(weight), int(groups.max()) + 1, -1)
    low, high = parts.amin(2).t().clamp_max(0), parts.amax(2).t().clamp_min(0)
    scales = ((high - low) / most).clamp_min(2.0**-24).half()  # of zeros, any will do
    zeros = (-low / scales).round().clamp(1, most).int()
    values = (weight.t() / scales[groups].float() + zeros[groups]).round().clamp(0, most).int()
    return values, zeros, scales


def _from_groups(values: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    return ((values - zeros[groups]).float() * scales[groups].float()).t().contiguous()


def _words(parts: list[Tensor], num_bits: int) -> Tensor:
    """The i-th tensor goes to bits num_bits * i."""
    total = parts[0].int()
    for i, part in enumerate(parts[1:], 1):
        total = total | part.int() << (num_bits * i)
    return total
