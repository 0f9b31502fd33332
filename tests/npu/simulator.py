"""What the NPU's operators compute, in plain PyTorch on CPU tensors.

Written from the wheel's own pages (torch_npu/_op_plugin_docs.py) and, where it has none, from the
operators' pages and unit tests in Ascend/op-plugin. Each function checks what its page demands, and
fills what the page leaves undefined with NaN, so that whoever reads it is found out. Importing this
module gives torch.ops.npu.* these CPU kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import tests.npu.simulator_attention
import tests.npu.simulator_collectives
import tests.npu.simulator_prolog
import tests.npu.simulator_sampling  # noqa: F401  (further operators)
from tests.npu.simulation import demand as _demand
from tests.npu.simulation import kernel as _kernel


@_kernel("npu_rms_norm")
def rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    _demand(x.dtype == gamma.dtype, "gamma has the dtype of the input")
    _demand(x.shape[-gamma.dim() :] == gamma.shape, "gamma has the trailing dims of the input")
    dims = tuple(range(-gamma.dim(), 0))
    rstd = torch.rsqrt(x.float().square().mean(dims, keepdim=True) + epsilon)
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


@_kernel("npu_add_rms_norm")
def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    _demand(x1.shape == x2.shape and x1.dtype == x2.dtype, "x1 and x2 are alike")
    total = x1 + x2
    y, rstd = rms_norm(total, gamma, epsilon)  # type: ignore[misc]
    return y, rstd, total


@_kernel("npu_rotary_mul")
def rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    _demand(x.dim() == r1.dim() == r2.dim() == 4, "rotary inputs have 4 dims")
    _demand(rotary_mode == "half" and rotate is None, "only half mode is simulated")
    _demand(r1.shape == r2.shape and r1.dtype == r2.dtype == x.dtype, "cos and sin are alike")
    _demand(r1.shape[2] == 1 and r1.shape[:2] == x.shape[:2], "BSND takes cos of 1S1D or BS1D")
    first, second = x.chunk(2, dim=-1)
    return x * r1 + torch.cat([-second, first], dim=-1) * r2


@_kernel("npu_interleave_rope")
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    _demand(x.shape[-1] == 64 and x.is_contiguous(), "x is contiguous and 64 wide")
    _demand(cos.shape == sin.shape and cos.shape[1] == 1, "cos and sin are [B, 1, S or 1, 64]")
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    first, second = halves.chunk(2, dim=-1)
    return halves * cos + torch.cat([-second, first], dim=-1) * sin


@_kernel("npu_swiglu")
def swiglu(x: Tensor, dim: int = -1) -> Tensor:
    first, second = x.chunk(2, dim=dim)
    return first * torch.sigmoid(first) * second


@_kernel("npu_scatter_nd_update_")
def scatter_nd_update(target: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    depth = indices.shape[-1]
    _demand(target.dtype == updates.dtype, "updates have the dtype of the input")
    _demand(indices.dtype in (torch.int32, torch.int64), "indices are integers")
    _demand(updates.shape == indices.shape[:-1] + target.shape[depth:], "updates fit the indices")
    limits = torch.tensor(target.shape[:depth])
    _demand(bool(((indices >= 0) & (indices < limits)).all()), "no index is out of bounds")
    target[tuple(indices.long().unbind(-1))] = updates
    return target


@_kernel("npu_scatter_nd_update")
def scatter_nd_update_into_a_copy(target: Tensor, indices: Tensor, updates: Tensor) -> object:
    return scatter_nd_update(target.clone(), indices, updates)


@_kernel("npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _demand(cache_mode == "PA", "only paged caches are simulated")
    _demand(kv.shape[1:] == (1, 1, 576) and kv.is_contiguous(), "kv is [B, 1, 1, 576]")
    _demand(index.dtype == torch.int64 and index.shape == kv.shape[:1], "index is [B] int64")
    _demand(k_cache.shape[2:] == (1, 64) and ckv_cache.shape[2:] == (1, 512), "caches are paged")
    _demand(not any(value is not None and value is not False for value in unused.values()), "plain")
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    _demand(bool(((index >= 0) & (index < num_slots)).all()), "no slot is out of bounds")
    latent, _ = rms_norm(kv[..., :512], gamma, epsilon)  # type: ignore[misc]
    rope = interleave_rope(kv[..., 512:].contiguous(), cos, sin)
    assert isinstance(rope, Tensor)
    block_size = k_cache.shape[1]
    k_cache[index // block_size, index % block_size] = rope[:, 0]
    ckv_cache[index // block_size, index % block_size] = latent[:, 0]
    return k_cache, ckv_cache, torch.full_like(rope, torch.nan), torch.full_like(latent, torch.nan)


@_kernel("npu_gather_pa_kv_cache")
def gather_pa_kv_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seq_offset: Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    _demand(block_tables.dtype == seq_lens.dtype == torch.int32, "tables and lengths are int32")
    _demand(seq_offset is None and not is_seq_lens_cumsum, "only whole sequences are simulated")
    start, block_size = 0, key_cache.shape[1]
    for row, length in zip(block_tables, seq_lens.tolist(), strict=True):
        position = torch.arange(length)
        blocks = row[position // block_size].long()
        for cache, out in ((key_cache, key), (value_cache, value)):
            out[start : start + length] = cache[blocks, position % block_size]
        start += length
    _demand(start == len(key) == len(value), "the output has a row per key")


@_kernel("npu_transpose_batchmatmul")
def transpose_batchmatmul(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    perm_x1: Sequence[int] = (0, 1, 2),
    perm_x2: Sequence[int] = (0, 1, 2),
    perm_y: Sequence[int] = (1, 0, 2),
    batch_split_factor: int = 1,
) -> Tensor:
    _demand(bias is None and scale is None and batch_split_factor == 1, "plain products")
    _demand(x.dtype == weight.dtype, "both have one dtype")
    product = torch.bmm(x.permute(*perm_x1), weight.permute(*perm_x2))
    return product.permute(*perm_y).contiguous()


@_kernel("npu_format_cast")
def format_cast(x: Tensor, acl_format: int, **_: object) -> Tensor:
    _demand(acl_format in (2, 29), "weights become FRACTAL_NZ, or plain again")
    return x.clone()  # what it was is not what it is: whoever kept the old one has a copy


@_kernel("npu_moe_gating_top_k_softmax")
def moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    _demand(finished is None, "no row is finished")
    y, ids = _top_k(x.float().softmax(-1), k)
    rows = torch.arange(ids.numel(), dtype=torch.int32).reshape(k, -1).t().contiguous()
    return y.to(x.dtype), ids.int(), rows


@_kernel("npu_moe_gating_top_k")
def moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor]:
    num_experts = x.shape[1]
    _demand(renorm == 0, "renorm is 0")
    _demand(num_experts % group_count == 0 and k <= num_experts // group_count * k_group, "k fits")
    _demand(bias is None or bias.dtype == x.dtype, "bias has the dtype of x")
    norm = x.float().sigmoid() if norm_type else x.float().softmax(-1)
    choice = norm if bias is None else norm + bias
    if group_count > 1:
        groups = choice.unflatten(1, (group_count, -1))
        best = groups.topk(2 if group_select_mode else 1, dim=-1).values.sum(-1)
        _, kept = _top_k(best, k_group)
        closed = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
        choice = groups.masked_fill(closed[..., None], -torch.inf).flatten(1)
    _, ids = _top_k(choice, k)
    y = norm.gather(1, ids)
    if norm_type:
        y = y / (y.sum(-1, keepdim=True) + eps)
    return (y * routed_scaling_factor).to(x.dtype), ids.int(), torch.full_like(norm, torch.nan)


def _top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Largest first; of equal ones the first."""
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids[..., :k]


@_kernel("npu_moe_init_routing_v2")
def moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    active_num: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    **unused: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _demand(expert_idx.dtype == torch.int32, "expert_idx is int32")
    _demand((drop_pad_mode, quant_mode, row_idx_type) == (0, -1, 0), "no drop, no quantisation")
    _demand(expert_tokens_num_type == 1 and expert_tokens_num_flag, "experts are counted")
    _demand(list(active_expert_range) == [0, expert_num], "all experts are active")
    _demand(active_num in (-1, 0, expert_idx.numel()), "all rows are active")
    flat = expert_idx.flatten().long()
    order = flat.argsort(stable=True)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order))
    counts = torch.bincount(flat, minlength=expert_num)
    undefined = torch.full((len(order),), torch.nan)
    return x[order // expert_idx.shape[1]], position.int(), counts, undefined


@_kernel("npu_moe_finalize_routing")
def moe_finalize_routing(
    rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor,
    row_index: Tensor,
    expert_for_source_row: Tensor | None,
    drop_pad_mode: int = 0,
    k: int = 1,
) -> Tensor:
    _demand(skip1 is skip2 is bias is None and drop_pad_mode == 2, "sums by rows, nothing added")
    _demand(scales.dtype == rows.dtype and row_index.dtype == torch.int32, "dtypes")
    chosen = rows[row_index.long().view(scales.shape)]  # [T, k, H]
    return (chosen * scales[..., None]).sum(1)


@_kernel("npu_grouped_matmul")
def grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    scale: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None,
    antiquant_offset: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    output_dtype: object = None,
    **unused: object,
) -> list[Tensor]:
    _demand(len(x) == len(weight) == 1 and split_item in (2, 3), "one input, one output")
    _demand(group_type == 0 and group_list.dtype == torch.int64, "rows are grouped")
    _demand(not (group_list_type == 1 and len(group_list) == 1), "counts are more than one")
    rows, groups = x[0], weight[0]
    _demand(len(group_list) == len(groups), "one number per group")
    stops = group_list.cumsum(0) if group_list_type == 1 else group_list
    _demand(int(stops[-1]) <= len(rows), "groups fit the rows")
    dtype = torch.float32 if rows.dtype == torch.int8 else rows.dtype
    out = torch.full((len(rows), groups.shape[2]), torch.nan, dtype=dtype)
    start = 0
    for group, stop in enumerate(stops.tolist()):
        matrix = groups[group].to(dtype)
        if antiquant_scale is not None and antiquant_offset is not None:
            matrix = (matrix + antiquant_offset[0][group]) * antiquant_scale[0][group]
        part = rows[start:stop].to(dtype) @ matrix
        if scale is not None and per_token_scale is not None:
            part = part * scale[0][group] * per_token_scale[0][start:stop, None]
        out[start:stop] = part
        start = stop
    return [out]


@_kernel("npu_dynamic_quant")
def dynamic_quant(x: Tensor, **unused: object) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1) / 127
    safe = torch.where(scale > 0, scale, 1.0)
    return (x.float() / safe[..., None]).round().clamp(-128, 127).nan_to_num().char(), scale


@_kernel("npu_quant_matmul")
def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor,
    bias: Tensor | None = None,
    output_dtype: object,
    **unused: object,
) -> Tensor:
    _demand(x1.dtype == x2.dtype == torch.int8, "both are int8")
    product = (x1.double() @ x2.double()).float() * scale.float() * pertoken_scale[:, None]
    return product if bias is None else product + bias.float()


@_kernel("npu_convert_weight_to_int4pack")
def convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    _demand(weight.dtype == torch.int32 and weight.shape[-1] % 8 == 0, "eight values to an int32")
    _demand(bool(((weight >= -8) & (weight <= 7)).all()), "values are of 4 bits")
    nibbles = (weight & 15).unflatten(-1, (-1, 8)).long()
    packed = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _unpacked(weight: Tensor) -> Tensor:
    nibbles = (weight.long()[..., None] >> torch.arange(0, 32, 4)) & 15
    return torch.where(nibbles >= 8, nibbles - 16, nibbles).flatten(-2)


@_kernel("npu_weight_quant_batchmatmul")
def weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    **unused: object,
) -> Tensor:
    _demand(antiquant_scale.dtype == x.dtype, "scales have the dtype of x")
    weight = _unpacked(weight) if weight.dtype == torch.int32 else weight
    _demand(antiquant_group_size % 32 == 0, "groups are a multiple of 32")
    group = antiquant_group_size or weight.shape[0]
    factor = antiquant_scale.view(-1, weight.shape[1]).repeat_interleave(group, 0)
    plain = weight.to(x.dtype)
    if antiquant_offset is not None:
        plain = plain + antiquant_offset.view(-1, weight.shape[1]).repeat_interleave(group, 0)
    out = x @ (plain * factor[: weight.shape[0]])
    return out if bias is None else out + bias
