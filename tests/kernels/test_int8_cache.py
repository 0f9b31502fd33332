"""Ops on int8 caches against the reference, which computes with the dequantised floats.

float32 tolerance 1e-5, as for float caches: both sides read the same int8 and scales. They differ
in where they multiply with the scale of a value, which rounds once more, by 6e-8 of an output.
"""

import pytest
import torch
from torch import Tensor

from kernels.kv_cache import QuantizedCache, quantize_rows, read_blocks
from kernels.ops import Ops
from tests.kernels.int8 import poisoned, with_int8_cache, with_int8_latents
from tests.kernels.paged import MIXED, make_batch, make_mla_batch
from tests.kernels.tolerance import ATTENTION_TOLERANCE


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "window"),
    [
        (9, 3, 64, 32, 0),
        (9, 3, 64, 32, 129),
        (8, 1, 128, 16, 0),
        (4, 4, 40, 5, 0),
        (60, 1, 80, 128, 0),
        (6, 2, 72, 1, 7),
        (3, 1, 16, 256, 0),
        (6, 2, 96, 24, 64),
    ],
)
def test_attention_equals_the_reference(
    cpu: Ops,
    reference: Ops,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int,
) -> None:
    batch = make_batch(
        MIXED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
    )
    int8 = with_int8_cache(batch)
    out, expected = int8.attend(cpu), int8.attend(reference)
    assert (out - expected).abs().max() < ATTENTION_TOLERANCE
    assert (out - batch.attend(reference)).abs().max() < 0.05, "it is an approximation of floats"


def test_a_row_has_the_same_bits_alone_chunked_and_batched(cpu: Ops) -> None:
    batch = with_int8_cache(
        make_batch(MIXED, num_heads=9, num_kv_heads=3, head_dim=64, block_size=32)
    )
    together = batch.attend(cpu)
    for seq in range(len(MIXED)):
        alone = batch.only(seq, 1, int(batch.context_lens[seq])).attend(cpu)[0]
        assert torch.equal(alone, together[int(batch.cu_seqlens_q[seq + 1]) - 1])
    chunks = [batch.only(2, 64, 64), batch.only(2, 7, 71), batch.only(2, 229, 300)]
    assert torch.equal(torch.cat([chunk.attend(cpu) for chunk in chunks]), together[2:302])


def test_a_row_is_within_half_a_step_of_its_floats() -> None:
    rows = torch.randn(50, 3, 72) * torch.logspace(-20, 20, 50)[:, None, None]
    rows[7] = 0.0
    values, scale = quantize_rows(rows)
    assert values.abs().amax(dim=-1).ne(127).sum() == 3, "only zeros do not use the whole range"
    error = (values.float() * scale - rows).abs()
    assert (error <= 0.5001 * scale).all()


@pytest.mark.parametrize("head_dim", [64, 40, 10])
def test_kv_write_stores_what_the_reference_stores(cpu: Ops, reference: Ops, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(37, 10, head_dim, generator=generator)
    fused[5, 8:] = 0.0  # a value of zeros
    fused[6, 6:8] = torch.nan
    q, k, v = fused[:, :6], fused[:, 6:8], fused[:, 8:]
    angles = torch.randn(37, head_dim // 2, generator=generator)
    slots = torch.randperm(64, generator=generator)[:37].int()
    slots[[3, 30]] = -1
    caches = []
    for ops in (cpu, reference):
        k_cache, v_cache = poisoned(8, 2, 8, head_dim), poisoned(8, 2, 8, head_dim)
        rotated = ops.rotary_kv_write(q, k, v, angles.cos(), angles.sin(), k_cache, v_cache, slots)
        caches.append((rotated, *k_cache, *v_cache))
    (q_ours, *ours), (q_expected, *expected) = caches
    torch.testing.assert_close(q_ours, q_expected)
    assert expected[1].isnan().sum() == 2 * (64 - 35 + 1), "unused rows, and the one of NaN"
    is_number = expected[1].isfinite()
    for tensor, wanted in zip(ours, expected, strict=True):
        # The rounding of both is the same, so that not one of the int8 differs.
        known = is_number.expand_as(wanted)
        assert torch.equal(tensor[known], wanted[known])
    assert torch.equal(ours[1].isnan(), expected[1].isnan())


def test_latent_attention_equals_the_reference(cpu: Ops, reference: Ops) -> None:
    batch = with_int8_latents(
        make_mla_batch(
            [(1, 1), (1, 200), (3, 130), (8, 513)],
            num_heads=4,
            rank=48,
            rope=8,
            nope=16,
            v_dim=12,
            block_size=16,
        )
    )
    q_latent = torch.einsum("thn,hnr->thr", batch.q_nope, batch.w_uk)
    out, expected = (
        ops.mla_paged_attention(q_latent, batch.q_rope, *batch.paging()) for ops in (cpu, reference)
    )
    assert (out - expected).abs().max() < ATTENTION_TOLERANCE
    out, expected = (
        ops.mla_prefill_attention(
            batch.q_nope, batch.q_rope, batch.w_uk, batch.w_uv, *batch.paging()
        )
        for ops in (cpu, reference)
    )
    assert (out - expected).abs().max() < ATTENTION_TOLERANCE


def test_latents_are_stored_as_the_reference_stores_them(cpu: Ops, reference: Ops) -> None:
    """A step of 1/127 of a row's largest number may differ: the norms round unlike."""
    generator = torch.Generator().manual_seed(0)
    kv, weight = torch.randn(20, 32 + 8, generator=generator), torch.rand(32, generator=generator)
    angles = torch.randn(20, 4, generator=generator)
    slots = torch.randperm(32, generator=generator)[:20].int()
    slots[4] = -1
    stored: list[tuple[QuantizedCache, QuantizedCache]] = []
    for ops in (cpu, reference):
        caches = poisoned(4, 1, 8, 32), poisoned(4, 1, 8, 8)
        ops.kv_rmsnorm_rope(kv, weight, angles.cos(), angles.sin(), *caches, slots, 1e-6)
        stored.append(caches)
    for ours, expected in zip(*stored, strict=True):
        torch.testing.assert_close(ours.scale, expected.scale, rtol=1e-5, atol=0, equal_nan=True)
        assert (ours.values.int() - expected.values.int()).abs().max() <= 1
        assert _share_of_unlike(ours.values, expected.values) < 0.01


def _share_of_unlike(ours: Tensor, expected: Tensor) -> float:
    return ours.ne(expected).float().mean().item()


def test_a_cache_without_its_scales_is_refused(cpu: Ops) -> None:
    batch = make_batch([(1, 40)], num_heads=2, num_kv_heads=1, head_dim=16, block_size=16)
    int8 = with_int8_cache(batch)
    assert isinstance(int8.k_cache, QuantizedCache)
    caches = (int8.k_cache.values, batch.v_cache)
    rest = (batch.block_table, batch.cu_seqlens_q, batch.context_lens, 1.0, 1)
    with pytest.raises(RuntimeError, match="k_cache must be float32 on the CPU"):
        cpu.paged_attention(batch.q, *caches, *rest)
    with pytest.raises(RuntimeError, match="one of both caches has scales"):
        cpu.paged_attention(batch.q, int8.k_cache, batch.v_cache, *rest)


def test_blocks_read_back_are_the_values_times_their_scales() -> None:
    cache = QuantizedCache(
        torch.randint(-127, 128, (4, 2, 8, 16), dtype=torch.int8), torch.rand(4, 2, 8, 1)
    )
    read = read_blocks(cache, torch.tensor([2, 0]))
    assert torch.equal(read[1], cache.values[0].float() * cache.scale[0])
