"""Batches and calls on the meta device, where the wheel's shape functions run."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.batch import KVBatch
from engine.kv_caches import poisoned_caches
from engine.kv_layout import kv_layout
from engine.models import CausalLM

META = torch.device("meta")
BLOCK_SIZE = 128


class Calls(TorchDispatchMode):
    """Notes which of the NPU's operators run, and that each gives what the wheel says."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            self.names.add(func._schema.name.removeprefix("npu::"))
            self.count += 1
        return func(*args, **(kwargs or {}))


def meta_batch(
    model: CausalLM,
    tp_size: int,
    seqlens: list[int],
    contexts: list[int],
    cache_dtype: str = "bfloat16",
) -> KVBatch:
    layout = kv_layout(model.config, BLOCK_SIZE, dtype=cache_dtype)
    with META:
        caches = poisoned_caches(layout.for_rank(0, tp_size), 65)
    num_tokens, num_decodes = sum(seqlens), len(seqlens) if max(seqlens) == 1 else 0
    return KVBatch(
        *caches,
        slot_mapping=torch.empty(num_tokens, dtype=torch.int32, device=META),
        block_table=torch.empty(len(seqlens), 32, dtype=torch.int32, device=META),
        cu_seqlens_q=torch.tensor([0, *seqlens], dtype=torch.int32).cumsum(0).int(),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        max_seqlen_q=max(seqlens),
        num_decode_seqs=num_decodes,
        num_decode_tokens=num_decodes,
    )
