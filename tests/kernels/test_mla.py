"""MLA: both forms against plain attention on expanded keys and values, on poisoned caches."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.gating import Gating
from kernels.ops import Ops
from tests.kernels.int8 import with_int8_latents
from tests.kernels.paged import (
    COMMON_PREFIXES,
    RELATED,
    PagedMLABatch,
    make_mla_batch,
    with_common_latents,
)

MIXED = [(1, 1), (1, 200), (300, 300), (2, 130), (70, 1000), (1, 513), (17, 64), (1, 128)]


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    ops: Ops = request.getfixturevalue(request.param)
    return ops


def expected_attention(batch: PagedMLABatch) -> Tensor:
    """[T, H, Dv] in float64: keys and values of each head written out, one query at a time."""
    q = torch.cat([batch.q_nope, batch.q_rope], dim=-1).double()
    rows = []
    for seq, context in enumerate(batch.context_lens.tolist()):
        latent, rope = (part.double() for part in batch.tokens[seq])
        k_nope = torch.einsum("cr,hdr->hcd", latent, batch.w_uk.double())
        keys = torch.cat([k_nope, rope.expand(len(k_nope), -1, -1)], dim=-1)
        values = torch.einsum("cr,hrv->hcv", latent, batch.w_uv.double())
        first, last = batch.cu_seqlens_q[seq : seq + 2].tolist()
        for row in range(first, last):
            seen = context - (last - first) + row - first + 1
            scores = batch.scale * torch.einsum("hd,hcd->hc", q[row], keys[:, :seen])
            rows.append(torch.einsum("hc,hcv->hv", scores.softmax(-1), values[:, :seen]))
    return torch.stack(rows)


def absorbed(batch: PagedMLABatch, ops: Ops) -> Tensor:
    out = ops.mla_paged_attention(
        ops.head_matmul(batch.q_nope, batch.w_uk), batch.q_rope, *batch.paging()
    )
    return ops.head_matmul(out, batch.w_uv)


def expanded(batch: PagedMLABatch, ops: Ops) -> Tensor:
    return ops.mla_prefill_attention(
        batch.q_nope, batch.q_rope, batch.w_uk, batch.w_uv, *batch.paging()
    )


@pytest.mark.parametrize("form", [absorbed, expanded])
@pytest.mark.parametrize(
    ("num_heads", "rank", "rope", "nope", "v_dim", "block_size"),
    [
        (4, 32, 8, 16, 16, 32),
        (5, 24, 6, 10, 12, 16),
        (1, 64, 16, 32, 48, 128),
        (16, 40, 8, 8, 8, 5),
    ],
)
def test_attention_is_that_of_expanded_keys_and_values(
    ops: Ops,
    form: Callable[[PagedMLABatch, Ops], Tensor],
    num_heads: int,
    rank: int,
    rope: int,
    nope: int,
    v_dim: int,
    block_size: int,
) -> None:
    batch = make_mla_batch(
        MIXED,
        num_heads=num_heads,
        rank=rank,
        rope=rope,
        nope=nope,
        v_dim=v_dim,
        block_size=block_size,
    )
    out = form(batch, ops)
    assert out.shape == (len(batch.q_nope), num_heads, v_dim)
    assert (out.double() - expected_attention(batch)).abs().max() < 2e-5


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize(("num_heads", "block_size"), [(1, 16), (5, 128), (16, 32)])
def test_shared_blocks_change_no_bit(
    cpu: Ops, num_heads: int, block_size: int, is_int8: bool
) -> None:
    batch = make_mla_batch(
        RELATED, num_heads=num_heads, rank=40, rope=8, nope=16, v_dim=16, block_size=block_size
    )
    shared, own = with_common_latents(batch, COMMON_PREFIXES)
    if is_int8:
        shared, own = with_int8_latents(shared), with_int8_latents(own)
    assert torch.equal(absorbed(shared, cpu), absorbed(own, cpu))


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "depth", "width"),
    [(1, 16, 128, 512), (7, 1, 512, 128), (65, 3, 10, 37), (50, 5, 33, 100), (0, 2, 8, 8)],
)
def test_every_head_meets_its_matrix(
    ops: Ops, num_tokens: int, num_heads: int, depth: int, width: int
) -> None:
    x = torch.full((num_tokens, num_heads, depth + 9), torch.nan)
    x[..., 4:-5] = torch.randn(num_tokens, num_heads, depth)
    part, weight = x[..., 4:-5], torch.randn(num_heads, depth, width) / depth**0.5
    out = ops.head_matmul(part, weight)
    expected = torch.einsum("tha,hab->thb", part.double(), weight.double())
    assert out.shape == expected.shape
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


def test_a_row_times_its_heads_matrices_is_the_same_in_any_batch(cpu: Ops) -> None:
    x, weight = torch.randn(61, 3, 40), torch.randn(3, 40, 150)
    whole = cpu.head_matmul(x, weight)
    assert whole.is_contiguous()
    for first, last in ((0, 1), (5, 18), (30, 61)):
        assert torch.equal(cpu.head_matmul(x[first:last], weight), whole[first:last])


def test_rope_turns_pairs_of_neighbours(ops: Ops) -> None:
    x = torch.randn(7, 3, 10)[:, 1:]
    angles = torch.randn(7, 5)
    out = ops.interleave_rope(x, angles.cos(), angles.sin())
    turned = torch.view_as_complex(x.reshape(7, 2, 5, 2)) * torch.polar(
        torch.ones(7, 1, 5), angles[:, None]
    )
    torch.testing.assert_close(out, torch.cat([turned.real, turned.imag], dim=-1))


def test_the_cache_takes_normalised_latents_and_rotated_ropes(ops: Ops) -> None:
    kv = torch.randn(5, 30)[:, 3:25]  # R = 16, P = 6, of wider rows
    weight, angles = torch.randn(16), torch.randn(5, 3)
    latent_cache, rope_cache = torch.full((4, 1, 8, 16), torch.nan), torch.full((4, 1, 8, 6), 9.0)
    slots = torch.tensor([17, 0, -1, 31, 8], dtype=torch.int32)
    ops.kv_rmsnorm_rope(
        kv, weight, angles.cos(), angles.sin(), latent_cache, rope_cache, slots, 1e-6
    )
    written = slots >= 0
    rows = slots[written].long()
    normed = ops.rms_norm(kv[:, :16].contiguous(), weight, 1e-6)[written]
    torch.testing.assert_close(latent_cache.flatten(0, 2)[rows], normed)
    rotated = ops.interleave_rope(kv[:, None, 16:], angles.cos(), angles.sin())[written, 0]
    torch.testing.assert_close(rope_cache.flatten(0, 2)[rows], rotated)
    assert latent_cache.isfinite().sum() == 4 * 16
    assert (rope_cache != 9.0).sum() == 4 * 6


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("group_scoring", ["max", "top2_sum"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("groups", "groups_per_tok"), [(1, 1), (4, 2), (8, 3), (4, 4)])
def test_gating_takes_the_best_experts_of_the_best_groups(
    ops: Ops, scoring: str, group_scoring: str, has_bias: bool, groups: int, groups_per_tok: int
) -> None:
    gating = Gating(
        num_experts_per_tok=5,
        scoring=scoring,  # type: ignore[arg-type]
        num_groups=groups,
        num_groups_per_tok=groups_per_tok,
        group_scoring=group_scoring,  # type: ignore[arg-type]
        is_normalized=scoring == "sigmoid",
        scaling_factor=2.5,
    )
    logits = 2 * torch.randn(40, 32)
    bias = torch.randn(32) if has_bias else None
    topk_weights, topk_ids = ops.moe_gating_topk(logits, gating, bias)
    scores = (logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)).tolist()
    size = 32 // groups
    for row, weights, ids in zip(scores, topk_weights, topk_ids.tolist(), strict=True):
        choice = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(row)]
        ranked = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
        count = 1 if group_scoring == "max" else 2
        best = sorted(range(groups), key=lambda g: -sum(ranked[g][:count]))[:groups_per_tok]
        allowed = [e for e in range(32) if e // size in best]
        chosen = sorted(allowed, key=lambda e: -choice[e])[:5]
        assert ids == chosen
        total = sum(row[e] for e in chosen) if scoring == "sigmoid" else 1.0
        expected = torch.tensor([2.5 * row[e] / total for e in chosen])
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
