"""The shapes that the C++ ops return, for torch.compile."""

from collections.abc import Callable

import torch
from torch import Tensor


def register_fakes() -> None:
    """Once the library is loaded."""

    def fake_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        return x.new_empty((x.shape[0], out_features))

    def fake_packed_rows(packed: Tensor, row_ids: Tensor, out_features: int) -> Tensor:
        return packed.new_empty((row_ids.shape[0], packed.shape[1]))

    def fake_quantized_rows(
        packed: Tensor, row_ids: Tensor, out_features: int, in_features: int, *_: int
    ) -> Tensor:
        return packed.new_empty((row_ids.shape[0], in_features), dtype=torch.float32)

    def fake_quantized_linear(
        x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, *_: int
    ) -> Tensor:
        return x.new_empty((x.shape[0], out_features))

    def fake_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.new_empty(x.shape)

    def fake_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x.new_empty(x.shape)

    def fake_rotary_kv_write(q: Tensor, *_: Tensor | None) -> Tensor:
        return q.new_empty(q.shape)

    def fake_paged_attention(q: Tensor, *_: Tensor | float | None) -> Tensor:
        return q.new_empty(q.shape)

    def fake_mla_paged_attention(q_latent: Tensor, *_: Tensor | float | None) -> Tensor:
        return q_latent.new_empty(q_latent.shape)

    def fake_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    def fake_kv_rmsnorm_rope(*_: Tensor | float | None) -> None:
        return None

    def fake_head_matmul(x: Tensor, weight: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:2], weight.shape[2]))

    def fake_silu_mul(gate_up: Tensor) -> Tensor:
        return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))

    def fake_moe_gating_topk(
        router_logits: Tensor, correction_bias: Tensor | None, k: int, *_: float
    ) -> tuple[Tensor, Tensor]:
        sizes = (router_logits.shape[0], k)
        return router_logits.new_empty(sizes), router_logits.new_empty(sizes, dtype=torch.int64)

    def fake_moe_init_routing(
        x: Tensor, topk_ids: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows = topk_ids.numel()
        index = x.new_empty(num_rows, dtype=torch.int64)
        return x.new_empty(num_rows, x.shape[1]), index, index.new_empty(num_experts)

    def fake_moe_finalize_routing(rows: Tensor, row_index: Tensor, topk_weights: Tensor) -> Tensor:
        return rows.new_empty(topk_weights.shape[0], rows.shape[1])

    def fake_add(x: Tensor, y: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    def fake_embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
        return weight.new_empty((token_ids.shape[0], weight.shape[1]))

    fakes: dict[str, Callable[..., Tensor | tuple[Tensor, ...] | None]] = {
        "linear": fake_linear,
        "quantized_linear": fake_quantized_linear,
        "quantized_rows": fake_quantized_rows,
        "packed_rows": fake_packed_rows,
        "rms_norm": fake_rms_norm,
        "add_rms_norm": fake_add_rms_norm,
        "rotary_kv_write": fake_rotary_kv_write,
        "paged_attention": fake_paged_attention,
        "mla_paged_attention": fake_mla_paged_attention,
        "interleave_rope": fake_interleave_rope,
        "kv_rmsnorm_rope": fake_kv_rmsnorm_rope,
        "head_matmul": fake_head_matmul,
        "silu_mul": fake_silu_mul,
        "moe_gating_topk": fake_moe_gating_topk,
        "moe_init_routing": fake_moe_init_routing,
        "moe_finalize_routing": fake_moe_finalize_routing,
        "add": fake_add,
        "embedding": fake_embedding,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"pdserve_cpu::{name}", fake)
