"""Families and the ways to spread them over ranks, for the tests of parallel engines."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.engine.tiny import tiny_hf
from tests.engine.tiny_families import tiny_deepseek

COMMS = ("zero_redundancy", "allreduce", "allgather")
# Four query heads over two KV heads: TP 4 holds every KV head twice. A vocabulary of 95 leaves the
# last rank fewer rows than the others.
DENSE: Mapping[str, Callable[[], PreTrainedModel]] = {
    "llama": partial(
        tiny_hf, LlamaForCausalLM, LlamaConfig, vocab_size=95, attention_bias=True, mlp_bias=True
    ),
    "mistral": partial(
        tiny_hf, MistralForCausalLM, MistralConfig, vocab_size=95, sliding_window=12
    ),
    "qwen2, tied": partial(
        tiny_hf, Qwen2ForCausalLM, Qwen2Config, vocab_size=95, tie_word_embeddings=True
    ),
    "qwen3": partial(tiny_hf, Qwen3ForCausalLM, Qwen3Config, vocab_size=95, head_dim=16),
}
_QWEN3_EXPERTS = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
SPARSE: Mapping[str, Callable[[], PreTrainedModel]] = {
    "mixtral": partial(
        tiny_hf, MixtralForCausalLM, MixtralConfig, vocab_size=95, num_local_experts=8
    ),
    "qwen3-moe": partial(
        tiny_hf, Qwen3MoeForCausalLM, Qwen3MoeConfig, vocab_size=95, **_QWEN3_EXPERTS
    ),
    "deepseek-v2": partial(tiny_deepseek, "v2", vocab_size=95, q_lora_rank=None),
    "deepseek-v3": partial(tiny_deepseek, "v3", vocab_size=95),
}
FAMILIES = {**DENSE, **SPARSE}


@dataclass(frozen=True, slots=True)
class Spread:
    """Fields of a ParallelConfig."""

    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    moe_comm: str = "zero_redundancy"
    moe_exchange: str = "all_to_all"
    sequence_parallel: bool = False
    dual_batch_overlap: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        parts = [f"tp{self.tp_size}", f"dp{self.dp_size}", f"ep{self.ep_size}"]
        parts += [self.moe_comm, self.moe_exchange] if self.ep_size > 1 else []
        parts += ["scattered"] * self.sequence_parallel + ["in halves"] * self.dual_batch_overlap
        return " ".join(parts)


def all_spreads(*, is_sparse: bool) -> list[Spread]:
    """Every one over TP 1, 2, 4, DP 1, 2 and EP 1, 2, 4, 8 that there can be, one process apart."""
    spreads = []
    for tp in (1, 2, 4):
        for dp in (1, 2):
            for ep in (1, 2, 4, 8) if is_sparse else (1,):
                if tp * dp > 1 and tp * dp % ep == 0:
                    comms = COMMS if ep > 1 else COMMS[:1]
                    spreads += [Spread(tp, dp, ep, comm) for comm in comms]
                    if ep > 1:
                        spreads.append(Spread(tp, dp, ep, moe_exchange="gather"))
            if tp > 1:
                spreads.append(Spread(tp, dp, sequence_parallel=True))
    halved = [replace(s, dual_batch_overlap=True) for s in spreads if s.tp_size * s.ep_size > 1]
    return spreads + halved


# What runs every time: each kind of layer split each way, experts within and beyond a
# tensor-parallel group. The rest of the matrix is marked slow.
QUICK_DENSE = {
    Spread(tp_size=2),
    Spread(tp_size=4, sequence_parallel=True),
    Spread(tp_size=2, dp_size=2),
}
QUICK_SPARSE = {
    Spread(tp_size=4),
    Spread(tp_size=4, ep_size=2, moe_comm="allgather"),
    Spread(dp_size=2, ep_size=2),
    *(Spread(2, 2, 4, comm) for comm in COMMS),
    Spread(2, 2, 4, moe_exchange="gather"),
    Spread(4, 2, 8),
    Spread(dp_size=2, ep_size=2, dual_batch_overlap=True),
    Spread(2, 2, 4, dual_batch_overlap=True),
}
