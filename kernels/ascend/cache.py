"""The paged cache on the NPU: rows written where tokens belong, and read back end to end.

Source: torch_npu 2.13.0, _op_plugin_docs.py, npu_dynamic_quant and npu_scatter_nd_update_.
"""

import torch
from torch import Tensor

from kernels.kv_cache import KVCache, QuantizedCache, read_blocks


def write_rows(cache: KVCache, slots: Tensor, rows: Tensor) -> None:
    """slots: [T, Hkv, 3] int32, block, head and offset; rows: [T, Hkv, D].

    NOTE: writes to the tensors as they came, not to views of them: in a compiled graph TorchAir
    would copy the whole cache for a view.
    """
    if isinstance(cache, QuantizedCache):
        values, scale = torch.ops.npu.npu_dynamic_quant(rows)
        torch.ops.npu.npu_scatter_nd_update_(cache.values, slots, values)
        torch.ops.npu.npu_scatter_nd_update_(cache.scale, slots, scale.unsqueeze(-1))
    else:
        torch.ops.npu.npu_scatter_nd_update_(cache, slots, rows)


def end_to_end(
    cache: KVCache, block_table: Tensor, context_lens: Tensor, dtype: torch.dtype
) -> Tensor:
    """The rows of all contexts, C in all, one after the other: [C, Hkv, D] in floats.

    context_lens: [N] on the host.
    """
    block_size, parts = cache.shape[2], []
    for block_ids, context_len in zip(block_table, context_lens.tolist(), strict=True):
        blocks = read_blocks(cache, block_ids[: -(-context_len // block_size)].long())
        parts.append(blocks.transpose(1, 2).flatten(0, 1)[:context_len].to(dtype))
    return torch.cat(parts)
