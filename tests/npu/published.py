"""The published models that shapes and graphs are checked with, and one rank's place in a group."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.collectives import Group
from engine.parallel import Parallel
from engine.parallel_config import MoEComm, ParallelConfig
from kernels.experts import ExchangeGroup

QWEN25_3B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
PUBLISHED = {
    "Qwen2.5-3B": QWEN25_3B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "DeepSeek-V3": DEEPSEEK_V3,
}


class ShapeGroup:
    """A group whose collectives only have the right shapes."""

    communicator = "exchange"

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self.size * x.shape[0], *x.shape[1:])

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0] // self.size, *x.shape[1:])

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return x.new_empty(sum(received), *x.shape[1:])

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x


def one_rank(
    tp_size: int = 1,
    ep_size: int = 1,
    *,
    rank: int = 0,
    moe_comm: MoEComm = "zero_redundancy",
    groups: dict[str, Group] | None = None,
    exchange: ExchangeGroup | None = None,
    exchange_rows: int = 0,
    fused_tp: ExchangeGroup | None = None,
    sequence_parallel: bool = False,
) -> Parallel:
    """Rank `rank` of max(tp_size, ep_size) ranks; `groups` may replace what only has shapes."""
    dp_size = max(ep_size // tp_size, 1)
    config = ParallelConfig(
        tp_size=tp_size,
        dp_size=dp_size,
        ep_size=ep_size,
        rank=rank,
        moe_comm=moe_comm,
        sequence_parallel=sequence_parallel,
    )
    given = groups or {}
    return Parallel(
        config=config,
        tp=given.get("tp", ShapeGroup(config.tp_rank, tp_size)),
        dp=given.get("dp", ShapeGroup(config.dp_rank, dp_size)),
        ep=given.get("ep", ShapeGroup(config.ep_rank, ep_size)),
        fused_tp=fused_tp,
        exchange=exchange,
        exchange_rows=exchange_rows,
    )
