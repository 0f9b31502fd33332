"""Attention over paged caches as the NPU's operators compute it; see simulator.py."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.npu.simulation import demand, kernel


@kernel("npu_fused_infer_attention_score_v2")
def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int],
    block_table: Tensor | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    num_query_heads: int = 1,
    softmax_scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    dequant_scale_key: Tensor | None = None,
    dequant_scale_value: Tensor | None = None,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    demand(query.is_contiguous() and key.is_contiguous(), "query and key are contiguous")
    if dequant_scale_key is not None and dequant_scale_value is not None:
        demand(input_layout == "BNSD" and block_table is not None, "one query, paged keys")
        demand(key_quant_mode == value_quant_mode == 5, "scales per token and head, paged")
        key = _dequantised(key, dequant_scale_key)
        value = _dequantised(value, dequant_scale_value)
    demand(query.dtype == key.dtype == value.dtype, "queries, keys and values have one dtype")
    demand(num_query_heads % num_key_value_heads == 0, "heads divide")
    if input_layout == "BNSD":
        demand(query.shape[2] == 1, "only one query each is simulated")
        demand(sparse_mode == 0, "one query each has no modes")
        rows = query.squeeze(2)
        ropes = None if query_rope is None else query_rope.squeeze(2)
        stops = list(range(1, len(rows) + 1))
        # What is masked by a tensor of its own has no window: it does not apply to one query.
        bands: list[Band] = [(None, None)] * len(rows)
        masks = _full_masks(atten_mask, query, key, block_table, has_rope=ropes is not None)
    else:
        demand(input_layout == "TND" and actual_seq_qlen is not None, "TND has lengths")
        assert actual_seq_qlen is not None
        demand(query.shape[2] in (128, 192, 512), "TND takes heads of 128 or 192, or latents")
        rows, ropes, stops = query, query_rope, list(actual_seq_qlen)
        demand(stops[-1] == len(rows) and stops == sorted(stops), "lengths are summed up to T")
        bands = [_band(sparse_mode, atten_mask, pre_tokens, next_tokens)] * len(stops)
        masks = [None] * len(stops)
    out = torch.full_like(rows[..., :1].expand(*rows.shape[:2], value.shape[-1]), torch.nan)
    contexts = _contexts(key, value, key_rope, block_table, actual_seq_kvlen, block_size)
    start = 0
    for stop, (keys, values), band, mask in zip(stops, contexts, bands, masks, strict=True):
        part = rows[start:stop] if ropes is None else torch.cat([rows, ropes], -1)[start:stop]
        if part.numel() and keys.numel():
            hidden = _hidden(len(part), len(keys), band)
            if mask is not None:
                hidden = hidden | mask[: len(keys)]
            out[start:stop] = _attend(part, keys, values, softmax_scale, hidden)
        start = stop
    return (out.unsqueeze(2) if input_layout == "BNSD" else out), torch.zeros(1)


def _dequantised(cache: Tensor, scale: Tensor) -> Tensor:
    demand(cache.dtype == torch.int8 and scale.dtype == torch.float32, "int8, float32 scales")
    demand(scale.shape == cache.shape[:3], "a scale per block, head and token")
    return cache.float() * scale[..., None]


def air_attention(query: Tensor, key: Tensor, value: Tensor, **options: object) -> object:
    """TorchAir's form: lengths are int64 tensors."""
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        lengths = options.get(name)
        if lengths is not None:
            assert isinstance(lengths, Tensor)
            demand(lengths.dtype == torch.int64, "lengths in a graph are int64")
            options[name] = lengths.tolist()
    return fused_infer_attention_score(query, key, value, **options)


@kernel("npu_fused_infer_attention_score_v2.out")
def fused_infer_attention_score_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    workspace: Tensor,
    out: Sequence[Tensor],
    **options: object,
) -> Sequence[Tensor]:
    demand(workspace.numel() > 0, "there is a workspace")
    found = fused_infer_attention_score(query, key, value, **options)
    assert isinstance(found, tuple)
    out[0].copy_(found[0])
    return out


@kernel("_npu_fused_infer_attention_score_v2_get_max_workspace")
def max_workspace(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
    return torch.empty(64, dtype=torch.uint8)


Band = tuple[int | None, int | None]
"""Keys that a query sees before and after the one below it, the last ones below each other."""


def _band(sparse_mode: int, mask: Tensor | None, pre_tokens: int, next_tokens: int) -> Band:
    if sparse_mode == 0:
        demand(mask is None, "no mask without a mode")
        return None, None
    demand(sparse_mode in (3, 4) and mask is not None, "right-down causal, or a band")
    assert mask is not None
    upper = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    demand(mask.shape == (2048, 2048) and torch.equal(mask.bool(), upper), "the compressed mask")
    return (None, 0) if sparse_mode == 3 else (pre_tokens, next_tokens)


def _full_masks(
    mask: Tensor | None, query: Tensor, key: Tensor, block_table: Tensor | None, *, has_rope: bool
) -> list[Tensor | None]:
    """A mask per sequence, [KV_S] bool."""
    if mask is None:
        return [None] * len(query)
    demand(not has_rope and block_table is not None, "latent decodes take no mask")
    assert block_table is not None
    width = block_table.shape[1] * key.shape[2]
    demand(mask.shape == (len(query), 1, 1, width), "a mask covers all keys of the table")
    demand(mask.dtype == torch.bool and mask.is_contiguous(), "masks are bool and contiguous")
    return list(mask[:, 0, 0])


def _hidden(num_queries: int, num_keys: int, band: Band) -> Tensor:
    """[queries, keys] bool."""
    own = torch.arange(num_queries)[:, None] + num_keys - num_queries
    keys = torch.arange(num_keys)
    hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    before, after = band
    if before is not None:
        hidden |= keys < own - before
    if after is not None:
        hidden |= keys > own + after
    return hidden


def _contexts(
    key: Tensor,
    value: Tensor,
    key_rope: Tensor | None,
    block_table: Tensor | None,
    lengths: Sequence[int],
    block_size: int,
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each sequence, [C, heads, ...]."""
    parts = [key, value] if key_rope is None else [key, value, key_rope]
    found = []
    if block_table is None:
        bounds = [0, *lengths]
        demand(bounds == sorted(bounds) and bounds[-1] == len(key), "lengths are summed up")
        for first, last in itertools.pairwise(bounds):
            found.append([part[first:last] for part in parts])
    else:
        demand(block_size in (16, 128) and key.shape[2] == block_size, "blocks of 16 or 128")
        demand(block_table.dtype == torch.int32 and len(block_table) == len(lengths), "tables")
        for row, length in zip(block_table.long(), lengths, strict=True):
            blocks = row[: -(-length // block_size)]
            found.append([part[blocks].transpose(1, 2).flatten(0, 1)[:length] for part in parts])
    if key_rope is None:
        return [(keys, values) for keys, values in found]
    return [(torch.cat([keys, ropes], -1), values) for keys, values, ropes in found]


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, hidden: Tensor) -> Tensor:
    """q: [S, N, D]; keys, values: [C, KV_N, ...]; hidden: [S, C] bool."""
    share = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    scores = scale * torch.einsum("snd,cnd->nsc", q.float(), keys.float())
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    # Masked keys may hold anything: they weigh nothing.
    values = torch.where(hidden.all(0)[:, None, None], 0.0, values.float())
    return torch.einsum("nsc,cnd->snd", weights, values).to(q.dtype)
