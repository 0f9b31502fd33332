"""What torch.compile and inductor need of the C++ ops: true schemas and fakes."""

import torch

from kernels.kv_cache import QuantizedCache
from kernels.ops import Ops
from tests.kernels.int8 import with_int8_cache
from tests.kernels.paged import make_batch


def test_every_op_has_a_true_schema_and_fake(cpu: Ops) -> None:
    ops = torch.ops.pdserve_cpu
    batch = make_batch([(1, 40), (9, 9)], num_heads=4, num_kv_heads=2, head_dim=16, block_size=16)
    k_cache, v_cache = torch.zeros(4, 2, 16, 16), torch.zeros(4, 2, 16, 16)
    q, k, v = torch.randn(10, 4, 16), torch.randn(10, 2, 16), torch.randn(10, 2, 16)
    half = torch.rand(10, 8)
    slots = torch.arange(10, dtype=torch.int32)
    packed = ops.pack_weight(torch.randn(70, 24))
    int8 = with_int8_cache(batch)
    attended = (
        batch.q.contiguous(),
        batch.k_cache.nan_to_num(),
        batch.v_cache.nan_to_num(),
        batch.block_table,
        batch.cu_seqlens_q,
        batch.context_lens,
    )
    k_int8, v_int8 = (
        QuantizedCache(c.byte().char(), c[..., :1].clone()) for c in (k_cache, v_cache)
    )
    calls = [
        (ops.paged_attention, (*attended, batch.scale)),
        (
            ops.paged_attention,
            (
                attended[0],
                int8.k_cache.values,
                int8.v_cache.values,
                *attended[3:],
                batch.scale,
                0,
                int8.k_cache.scale.nan_to_num(),
                int8.v_cache.scale.nan_to_num(),
            ),
        ),
        (ops.rotary_kv_write, (q, k, v, half, half, k_cache, v_cache, slots)),
        (
            ops.rotary_kv_write,
            (
                *(q, k, v, half, half, k_int8.values, v_int8.values, slots),
                *(k_int8.scale, v_int8.scale),
            ),
        ),
        (ops.rms_norm, (torch.randn(3, 24), torch.randn(24), 1e-5)),
        (ops.add_rms_norm, (torch.randn(3, 24), torch.randn(3, 24), torch.randn(24), 1e-5)),
        (ops.head_matmul, (torch.randn(3, 2, 8), torch.randn(2, 8, 5))),
        (ops.silu_mul, (torch.randn(3, 24),)),
        (ops.embedding, (torch.tensor([1, 2]), torch.randn(5, 8))),
        (ops.linear, (torch.randn(3, 24), packed, None, 70)),
        (ops.packed_rows, (packed, torch.tensor([1, 69]), 70)),
    ]
    for op, args in calls:
        torch.library.opcheck(op.default, args)


def test_a_layer_of_ops_compiles_into_one_graph(cpu: Ops) -> None:
    batch = make_batch([(1, 40), (9, 9)], num_heads=4, num_kv_heads=2, head_dim=16, block_size=16)
    linear, weight = cpu.linear(torch.randn(64, 64), None), torch.rand(64)

    def layer(residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        attended = batch.attend_with(cpu, 9)
        return cpu.add_rms_norm(linear(attended.flatten(1)), residual, weight, 1e-5)

    residual = torch.randn(10, 64)
    wanted = layer(residual.clone())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = compiled(residual.clone())
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
