"""Norms, rotary + KV write, SiLU-mul and embedding of the C++ backend against the reference.

float32 tolerance 1e-5 on values of order 1 to 10: a few roundings of 1e-6 each.
"""

import pytest
import torch

from kernels.ops import Ops

TOLERANCE = 1e-5


@pytest.mark.parametrize("shape", [(1, 576), (7, 577), (70, 3), (0, 64), (5, 9, 64), (3, 2, 33)])
def test_rms_norm_equals_the_reference(cpu: Ops, reference: Ops, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    assert torch.allclose(
        cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), atol=TOLERANCE
    )


def test_rms_norm_takes_heads_of_a_wider_row(cpu: Ops, reference: Ops) -> None:
    qkv = torch.randn(6, 15, 64)
    weight = torch.randn(64)
    heads = qkv[:, 9:12]
    assert torch.allclose(
        cpu.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6), atol=TOLERANCE
    )


@pytest.mark.parametrize("shape", [(1, 576), (33, 577), (300, 40)])
def test_add_rms_norm_equals_the_reference(
    cpu: Ops, reference: Ops, shape: tuple[int, int]
) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    wanted = reference.add_rms_norm(x, residual, weight, 1e-5)
    normed, total = cpu.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(total, wanted[1])
    assert torch.allclose(normed, wanted[0], atol=TOLERANCE)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4), (5, 1)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 32), (16, 1), (80, 16), (6, 128)])
def test_rotary_and_kv_write_equal_the_reference(
    cpu: Ops, reference: Ops, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    num_tokens, num_blocks = 41, -(-64 // block_size)
    row = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = row.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    angle = torch.rand(num_tokens, head_dim // 2) * 6
    slots = torch.randperm(num_blocks * block_size)[:num_tokens].int()
    slots[::5] = -1
    caches = [
        torch.full((num_blocks, num_kv_heads, block_size, head_dim), torch.nan) for _ in range(4)
    ]
    rotated = cpu.rotary_kv_write(q, k, v, angle.cos(), angle.sin(), caches[0], caches[1], slots)
    wanted = reference.rotary_kv_write(
        q, k, v, angle.cos(), angle.sin(), caches[2], caches[3], slots
    )
    assert rotated.is_contiguous()
    assert torch.allclose(rotated, wanted, atol=TOLERANCE)
    # Equal where written, and NaN still where not.
    assert torch.allclose(caches[0], caches[2], atol=TOLERANCE, equal_nan=True)
    assert torch.allclose(caches[1], caches[3], atol=0, equal_nan=True)


def test_a_slot_outside_the_cache_is_refused(cpu: Ops) -> None:
    one = torch.ones(1, 1, 8)
    cache = torch.zeros(2, 1, 4, 8)
    half = torch.ones(1, 4)
    with pytest.raises(IndexError, match="slot 8 of 8"):
        cpu.rotary_kv_write(
            one, one, one, half, half, cache, cache.clone(), torch.tensor([8], dtype=torch.int32)
        )


@pytest.mark.parametrize("shape", [(1, 3072), (33, 62), (300, 200)])
def test_silu_mul_equals_the_reference(cpu: Ops, reference: Ops, shape: tuple[int, int]) -> None:
    gate_up = torch.randn(shape) * 5
    assert torch.allclose(
        cpu.silu_mul(gate_up), reference.silu_mul(gate_up), atol=TOLERANCE, rtol=1e-6
    )


def test_silu_mul_of_extreme_gates_is_zero_or_the_gate(cpu: Ops) -> None:
    gate_up = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    assert torch.allclose(cpu.silu_mul(gate_up), torch.tensor([[0.0, 0.0, 100.0, 1e4]]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_embedding_returns_rows_exactly(cpu: Ops, dtype: torch.dtype) -> None:
    weight = torch.randn(50, 37)
    ids = torch.tensor([49, 0, 7, 7], dtype=dtype)
    assert torch.equal(cpu.embedding(ids, weight), weight[ids])


def test_a_token_id_outside_the_vocabulary_is_refused(cpu: Ops) -> None:
    with pytest.raises(IndexError, match=r"id -1 is not in \[0, 50\)"):
        cpu.embedding(torch.tensor([-1]), torch.randn(50, 4))
