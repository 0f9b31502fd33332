"""Folders of quantised safetensors, packed by each format's own rule."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.safetensors_formats import (
    COMPRESSED,
    Pack,
    Packed,
    groups_of,
    pack_awq,
    pack_fp8,
    pack_gptq,
    pack_int8,
)
from tests.engine.tiny import tiny_hf_llama

GROUP = 16
FP8_BLOCK = (24, 16)


def shuffled(num_inputs: int) -> Tensor:
    order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))
    return groups_of(num_inputs, GROUP)[order]


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


in_order = partial(groups_of, size=GROUP)


def gptq(num_bits: int, stored_less: int, groups_of_inputs: Callable[[int], Tensor]) -> Pack:
    return partial(
        pack_gptq, num_bits=num_bits, stored_less=stored_less, groups_of_inputs=groups_of_inputs
    )


FORMATS: dict[str, tuple[Pack, Mapping[str, Any] | None, bool]] = {
    # packing, quantization_config, whether the blocks can be kept
    "awq": (
        partial(pack_awq, group_size=GROUP),
        {"quant_method": "awq", "bits": 4, "group_size": GROUP},
        True,
    ),
    "gptq": (
        gptq(4, 1, in_order),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
        True,
    ),
    "gptq, second version, 8 bits": (
        gptq(8, 0, in_order),
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
    "fp8": (
        partial(pack_fp8, block=FP8_BLOCK),
        {"quant_method": "fp8", "weight_block_size": list(FP8_BLOCK)},
        False,
    ),
    "compressed-tensors": (pack_int8, COMPRESSED, True),
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
