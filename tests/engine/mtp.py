"""A tiny DeepSeek-V3 with MTP layers, in transformers and as files with DeepSeek's names."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from tests.engine.tiny_families import tiny_deepseek


def tiny_mtp(folder: Path, num_layers: int = 1, **options: Any) -> tuple[PreTrainedModel, MtpModel]:
    """Random weights, written to the folder."""
    hf = tiny_deepseek("v3", num_mtp_layers=num_layers, **options)
    mtp = MtpModel(hf, num_layers).eval()
    generator = torch.Generator().manual_seed(11)
    hf.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for layer_idx, layer in enumerate(mtp.layers, start=2):
        with torch.no_grad():
            for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
        for name, tensor in layer.state_dict().items():
            name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            tensors[f"model.layers.{layer_idx}.{name}"] = tensor.clone()
        # Copies that DeepSeek's files hold and nobody reads.
        for name in ("embed_tokens.weight", "shared_head.head.weight"):
            tensors[f"model.layers.{layer_idx}.{name}"] = torch.zeros(3)
    save_file(tensors, path)
    return hf, mtp
