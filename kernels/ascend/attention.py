"""Attention by npu_fused_infer_attention_score_v2, over the paged cache or keys laid end to end.

The operator takes sequence lengths from the host. How they get there depends on how the step runs:
as lists when it runs at once, as tensors inside a graph that TorchAir compiles, and as lists that
are replaced before each replay of a captured graph. So a call is first described, then launched.

A window hides the keys before it: by the operator's band mode in prompts, whose band hangs from the
last query and key; by a mask of its own in decode steps, where the operator has no modes.

Source: torch_npu 2.13.0, _op_plugin_docs.py, npu_fused_infer_attention_score_v2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.ascend.cache import end_to_end
from kernels.kv_cache import KVCache, tensors_of

BLOCK_SIZE = 128
"""Tokens per block that every path of the operator takes."""
MASK_SIZE = 2048
"""The compressed causal mask has this many rows and columns, whatever the lengths are."""
RIGHT_DOWN_CAUSAL = 3
BAND = 4
PER_TOKEN_AND_HEAD_PAGED = 5
_TND_HEAD_DIMS = (128, 192)
_LATENT_NUM_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
_LATENT_WIDTHS = (512, 64)
_MAX_LATENT_SEQLEN_Q = 16
_MAX_SEQUENCES = 4096
_MAX_HEADS_PER_KV_HEAD = 64
_MAX_CACHE_ELEMENTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the operator, its lengths still in tensors."""

    query: Tensor
    key: Tensor
    value: Tensor
    seqlens_q: Tensor | None
    """[N], summed up: where each sequence's queries end; None where each has one."""
    seqlens_kv: Tensor
    """[N]: keys of each sequence; summed up where keys are not paged."""
    options: dict[str, Any]
    """Everything else, by the operator's names."""

    def host_lengths(self) -> dict[str, list[int] | None]:
        """The lengths as the operator takes them when it is launched directly."""
        return {
            "actual_seq_qlen": None if self.seqlens_q is None else self.seqlens_q.tolist(),
            "actual_seq_kvlen": self.seqlens_kv.tolist(),
        }


Launch = Callable[[AttentionCall], Tensor]
"""Runs a call; the result has the query's layout."""


def launch(call: AttentionCall) -> Tensor:
    """Run it now or, while TorchAir traces, put it into the graph."""
    if torch.compiler.is_compiling():
        lengths_q = None if call.seqlens_q is None else _int64(call.seqlens_q)
        # The form of TorchAir: lengths are tensors, so that other ones need no other graph.
        out: Tensor = torch.ops.air.npu_fused_infer_attention_score_v2(
            call.query,
            call.key,
            call.value,
            actual_seq_qlen=lengths_q,
            actual_seq_kvlen=_int64(call.seqlens_kv),
            **call.options,
        )[0]
        return out
    out = torch.ops.npu.npu_fused_infer_attention_score_v2(
        call.query, call.key, call.value, **call.host_lengths(), **call.options
    )[0]
    return out


def causal_mask(device: torch.device) -> Tensor:
    """[MASK_SIZE, MASK_SIZE] bool, True above the diagonal: hidden."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu_(1)


def grouped_query(
    q: Tensor,
    k_cache: KVCache,
    v_cache: KVCache,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
    max_seqlen_q: int,
    mask: Tensor,
    window: int = 0,
) -> AttentionCall:
    """The call of `Ops.paged_attention`; out is [N, Hq, 1, D] for decode steps, else [T, Hq, D].

    From an int8 cache decode steps read in place, with the scales where the cache has them
    (mode 5: per token and head, paged). With more queries the operator takes no paged
    int8: keys and values are brought to floats, end to end.

    Raises: ValueError: the operator cannot do it; says which limit.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    _check_paged(q, k_cache, block_table, block_size)
    if num_heads % num_kv_heads or num_heads // num_kv_heads > _MAX_HEADS_PER_KV_HEAD:
        raise ValueError(
            f"attention: {num_heads} query heads over {num_kv_heads} KV heads, "
            f"the NPU operator takes a whole ratio of at most {_MAX_HEADS_PER_KV_HEAD}"
        )
    options: dict[str, Any] = {
        "num_query_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "softmax_scale": scale,
    }
    paging = {"block_table": block_table, "block_size": block_size}
    k_values, k_scale = tensors_of(k_cache)
    v_values, v_scale = tensors_of(v_cache)
    if max_seqlen_q == 1:
        _check_one_query_each(q, block_table)
        options |= paging | {"input_layout": "BNSD"}
        if window:
            options["atten_mask"] = _before_window(context_lens, block_table, window)
        if k_scale is not None and v_scale is not None:
            options |= {
                "dequant_scale_key": k_scale.squeeze(-1),
                "dequant_scale_value": v_scale.squeeze(-1),
                "key_quant_mode": PER_TOKEN_AND_HEAD_PAGED,
                "value_quant_mode": PER_TOKEN_AND_HEAD_PAGED,
            }
        return AttentionCall(q.unsqueeze(2), k_values, v_values, None, context_lens, options)
    if head_dim not in _TND_HEAD_DIMS:
        raise ValueError(
            f"attention: head_dim is {head_dim}, the NPU operator takes {_TND_HEAD_DIMS} in prefill"
        )
    options |= {"input_layout": "TND", "sparse_mode": RIGHT_DOWN_CAUSAL, "atten_mask": mask}
    if window:
        options |= {"sparse_mode": BAND, "pre_tokens": window - 1, "next_tokens": 0}
    if k_scale is None:
        options |= paging
        return AttentionCall(q, k_values, v_values, cu_seqlens_q[1:], context_lens, options)
    keys, values = (
        end_to_end(cache, block_table, context_lens, q.dtype) for cache in (k_cache, v_cache)
    )
    return AttentionCall(
        q.contiguous(), keys, values, cu_seqlens_q[1:], context_lens.cumsum(0), options
    )


def _before_window(context_lens: Tensor, block_table: Tensor, window: int) -> Tensor:
    """[N, 1, 1, max_blocks * BLOCK_SIZE] bool, True for keys that the newest token does not see."""
    num_keys = block_table.shape[1] * BLOCK_SIZE
    positions = torch.arange(num_keys, dtype=torch.int32, device=block_table.device)
    starts = (context_lens - window).to(block_table.device)
    return positions < starts[:, None, None, None]


def latent(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
    max_seqlen_q: int,
    mask: Tensor,
) -> AttentionCall:
    """The call of `Ops.mla_paged_attention`; out is [N, H, 1, R] for decode steps, else [T, H, R].

    Caches: [num_blocks, 1, block_size, R] and [num_blocks, 1, block_size, P].
    Raises: ValueError: the operator cannot do it; says which limit.
    """
    num_heads = q_latent.shape[1]
    _check_paged(q_latent, latent_cache, block_table, latent_cache.shape[2])
    if (q_latent.shape[2], q_rope.shape[2]) != _LATENT_WIDTHS:
        raise ValueError(
            f"latent attention: kv_lora_rank and rope width are {q_latent.shape[2]} and "
            f"{q_rope.shape[2]}, the NPU operator takes {_LATENT_WIDTHS}"
        )
    if num_heads not in _LATENT_NUM_HEADS:
        raise ValueError(
            f"latent attention: {num_heads} heads a rank, the NPU operator takes "
            f"{_LATENT_NUM_HEADS}"
        )
    if max_seqlen_q > _MAX_LATENT_SEQLEN_Q:
        raise ValueError(
            f"latent attention: {max_seqlen_q} queries of one sequence, the absorbed form takes "
            f"{_MAX_LATENT_SEQLEN_Q}"
        )
    options: dict[str, Any] = {
        "key_rope": rope_cache,
        "block_table": block_table,
        "num_query_heads": num_heads,
        "num_key_value_heads": 1,
        "softmax_scale": scale,
        "block_size": latent_cache.shape[2],
    }
    if max_seqlen_q == 1:
        _check_one_query_each(q_latent, block_table)
        options |= {"query_rope": q_rope.unsqueeze(2).contiguous(), "input_layout": "BNSD"}
        query = q_latent.unsqueeze(2).contiguous()
        return AttentionCall(query, latent_cache, latent_cache, None, context_lens, options)
    options |= {
        "query_rope": q_rope.contiguous(),
        "input_layout": "TND",
        "sparse_mode": RIGHT_DOWN_CAUSAL,
        "atten_mask": mask,
    }
    query = q_latent.contiguous()
    return AttentionCall(query, latent_cache, latent_cache, cu_seqlens_q[1:], context_lens, options)


def expanded(
    query: Sequence[Tensor],
    key: Sequence[Tensor],
    value: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
    mask: Tensor,
) -> AttentionCall:
    """MLA over keys that are not paged; query and key: (without position, rotated part).

    [T, H, 128] and [T, H, 64]; of keys and of value as many rows as all contexts together have.
    Raises: ValueError: the operator cannot do it; says which limit.
    """
    num_heads, width = query[0].shape[1:]
    if width != 128 or value.shape[2] != 128:
        raise ValueError(
            f"latent attention: heads of q and v are {width} and {value.shape[2]} wide, "
            "the NPU operator takes 128 for both in prefill"
        )
    options = {
        "query_rope": query[1].contiguous(),
        "key_rope": key[1].contiguous(),
        "num_query_heads": num_heads,
        "num_key_value_heads": num_heads,
        "softmax_scale": scale,
        "input_layout": "TND",
        "sparse_mode": RIGHT_DOWN_CAUSAL,
        "atten_mask": mask,
    }
    seqlens_kv = context_lens.cumsum(0)
    return AttentionCall(
        query[0].contiguous(), key[0].contiguous(), value, cu_seqlens_q[1:], seqlens_kv, options
    )


def _check_paged(q: Tensor, cache: KVCache, block_table: Tensor, block_size: int) -> None:
    if block_size != BLOCK_SIZE:
        raise ValueError(f"block_size is {block_size}, the NPU operators take {BLOCK_SIZE}")
    values, scale = tensors_of(cache)
    if scale is None and q.dtype != values.dtype:
        raise ValueError(f"attention: queries are {q.dtype}, the cache is {values.dtype}")
    if block_table.dtype != torch.int32:
        raise ValueError(f"attention: block_table is {block_table.dtype}, must be int32")
    if values.numel() > _MAX_CACHE_ELEMENTS:
        raise ValueError(
            f"attention: the cache of one layer has {values.numel()} elements, the NPU operator "
            f"takes {_MAX_CACHE_ELEMENTS}: lower num_blocks"
        )
    if block_table.shape[0] > _MAX_SEQUENCES:
        raise ValueError(
            f"attention: {block_table.shape[0]} sequences, the NPU operator takes {_MAX_SEQUENCES}"
        )


def _check_one_query_each(q: Tensor, block_table: Tensor) -> None:
    if q.shape[0] != block_table.shape[0]:
        raise ValueError(
            f"attention: {q.shape[0]} queries of {block_table.shape[0]} sequences in a decode step"
        )


def _int64(lengths: Tensor) -> Tensor:
    return lengths if lengths.dtype == torch.int64 else lengths.long()
