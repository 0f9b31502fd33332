"""A decode step as TorchAir converts it: one rank's model on static tensors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.batch import KVBatch
from engine.kv_layout import kv_layout
from engine.models import CausalLM

BLOCK_SIZE = 128


def static_batch(model: CausalLM, num_seqs: int, num_kv_heads: int | None = None) -> KVBatch:
    """What a graph of `num_seqs` decodes reads; one rank's caches, in the form that graphs take."""
    layout = kv_layout(model.config, BLOCK_SIZE)
    caches: list[list[Tensor]] = [[], []]
    for _ in range(layout.num_layers):
        for part, found in zip(layout.parts, caches, strict=True):
            shape = (5, num_kv_heads or part.num_heads, BLOCK_SIZE, part.width)
            if layout.kv_lora_rank:
                shape = (5, BLOCK_SIZE, 1, part.width)
            found.append(torch.zeros(shape, dtype=torch.bfloat16))
    return KVBatch(
        *caches,
        slot_mapping=torch.zeros(num_seqs, dtype=torch.int32),
        block_table=torch.zeros(num_seqs, 4, dtype=torch.int32),
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32),
        context_lens=torch.ones(num_seqs, dtype=torch.int32),
        max_seqlen_q=1,
        num_decode_seqs=num_seqs,
        num_decode_tokens=num_seqs,
    )


def decode_step(model: CausalLM, kv: KVBatch) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """The step and its arguments."""

    def step(
        input_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        context_lens: Tensor,
        k_caches: list[Tensor],
        v_caches: list[Tensor],
    ) -> Tensor:
        batch = replace(
            kv,
            k_caches=k_caches,
            v_caches=v_caches,
            slot_mapping=slots,
            block_table=block_table,
            context_lens=context_lens.long(),
        )
        return model(input_ids, positions, batch)

    ids = torch.zeros_like(kv.slot_mapping)
    return step, (
        ids,
        ids.clone(),
        kv.slot_mapping,
        kv.block_table,
        kv.context_lens,
        list(kv.k_caches),
        list(kv.v_caches),
    )
