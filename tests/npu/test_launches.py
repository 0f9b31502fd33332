"""How many operators an eager decode step has the host launch, against one graph."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.checkpoint.config import parse_model_config
from engine.layers.layer import pack_weights
from engine.models import build_model
from kernels.npu import NpuOps
from tests.npu.meta import META, meta_batch
from tests.npu.published import PUBLISHED

DOCS = Path(__file__).parents[2] / "docs" / "npu.md"
NUM_LAYERS = {"Qwen2.5-3B": 36, "Qwen3-30B-A3B": 48, "DeepSeek-V3": 61}
NUM_SEQS = 32


class Launches(TorchDispatchMode):
    """Counts operators that put work on the device: not views, not allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view and not func._schema.name.startswith(("aten::empty", "aten::_unsafe_view")):
            self.count += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def count_launches(name: str, num_layers: int) -> int:
    """Of one decode step of NUM_SEQS sequences, up to the hidden states."""
    ops = NpuOps(device=META)
    options: dict[str, Any] = {"num_hidden_layers": num_layers}
    if name == "DeepSeek-V3":
        options["first_k_dense_replace"] = min(3, num_layers)
    with META:
        model = build_model(parse_model_config(PUBLISHED[name] | options), ops)
        pack_weights(model)
    kv = meta_batch(model, 1, [1] * NUM_SEQS, [100] * NUM_SEQS)
    token_ids = torch.zeros(NUM_SEQS, dtype=torch.int32, device=META)
    with Launches() as launches:
        model(token_ids, token_ids, kv)
    return launches.count


def table() -> Iterator[str]:
    yield "| Model | Layers | Operators launched, eager | Launched as one graph |"
    yield "|---|---|---|---|"
    for name, num_layers in NUM_LAYERS.items():
        yield f"| {name} | {num_layers} | {count_launches(name, num_layers):,} | 1 |"


@pytest.mark.usefixtures("all_shapes")
def test_the_table_of_launches_in_the_documentation_is_what_is_counted() -> None:
    text = DOCS.read_text()
    missing = [line for line in table() if line not in text]
    assert not missing, "docs/npu.md lacks:\n" + "\n".join(table())
