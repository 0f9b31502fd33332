"""LoRA adapters as PEFT writes them, and the models that they stand for."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel


def write_adapter(
    folder: Path, hf: PreTrainedModel, targets: tuple[str, ...], seed: int, **options: Any
) -> dict[str, Tensor]:
    """A PEFT folder with random weights; return what it adds, by the weight's name."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": list(targets)}
    config |= {"bias": "none", "use_dora": False, "modules_to_save": None} | options
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors, deltas = {}, {}
    for name, module in hf.named_modules():
        if name.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear):
            out_features, in_features = module.weight.shape
            a = 0.3 * torch.randn(4, in_features, generator=generator)
            b = 0.3 * torch.randn(out_features, 4, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            deltas[name] = (6 / 4**0.5 if options.get("use_rslora") else 6 / 4) * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    return deltas


def merge(hf: PreTrainedModel, deltas: dict[str, Tensor], sign: int) -> None:
    with torch.no_grad():
        for name, delta in deltas.items():
            hf.get_submodule(name).weight += sign * delta
