"""Small models of each family, in the widths that the NPU's operators demand."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.batch import BatchBuilder
from engine.checkpoint.config import parse_model_config
from engine.kv_caches import poisoned_caches
from engine.kv_layout import kv_layout
from engine.layers.layer import named_weights, pack_weights
from engine.models import CausalLM, build_model
from engine.request import Request, SamplingParams
from engine.scheduler_output import ScheduledRequest
from kernels.ops import Ops

BLOCK_SIZE = 128
COMMON = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 128,
        "norm_topk_prob": True,
    }
    | _EXPERTS,
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 2,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}


def family(
    name: str, ops: Ops, quantization: Any = "none", *, is_packed: bool = True, **options: Any
) -> CausalLM:
    """The model with the same random weights every time."""
    config = parse_model_config(COMMON | CONFIGS[name] | options)
    model = build_model(config, ops)
    fill(model)
    if is_packed:
        pack_weights(model, quantization)
    return model


def fill(model: CausalLM) -> dict[str, Tensor]:
    """Give the model its random weights; they are returned by name."""
    generator = torch.Generator().manual_seed(0)
    weights = named_weights(model)
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return weights


@dataclass(frozen=True, slots=True)
class Caches:
    """Caches full of NaN, the last block being the spare one."""

    k: list[Any]
    v: list[Any]


def caches(model: CausalLM, num_blocks: int, dtype: str = "float32") -> Caches:
    """One spare block more than num_blocks."""
    layout = kv_layout(model.config, BLOCK_SIZE, dtype=dtype)
    return Caches(*poisoned_caches(layout, num_blocks + 1))


def make_request(index: int, token_ids: list[int]) -> Request:
    return Request(
        request_id=f"request-{index}",
        attempt=0,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(),
    )


@torch.inference_mode()
def generate(
    model: CausalLM,
    prompts: list[list[int]],
    num_tokens: int,
    num_cached: int = 0,
    cache_dtype: str = "float32",
) -> tuple[list[list[int]], Tensor]:
    """Greedy tokens of all prompts in one batch, and the logits [steps, N, V] that gave them.

    num_cached: the first so many tokens of all prompts are equal and computed once, then shared.
    """
    made = caches(model, num_blocks=4 * len(prompts) + 4, dtype=cache_dtype)
    builder = BatchBuilder(made.k, made.v, BLOCK_SIZE)
    free = torch.randperm(4 * len(prompts) + 4, generator=torch.Generator().manual_seed(1)).tolist()
    requests = [make_request(i, prompt) for i, prompt in enumerate(prompts)]
    shared = [free.pop() for _ in range(num_cached // BLOCK_SIZE)]
    if num_cached:
        first = make_request(-1, prompts[0][:num_cached])
        first.block_ids += shared
        _step(model, builder, [(first, num_cached)])
    for request in requests:
        request.block_ids += shared
        request.num_computed_tokens = num_cached
        needed = -(-(request.num_tokens + num_tokens) // BLOCK_SIZE) - len(request.block_ids)
        request.block_ids += [free.pop() for _ in range(needed)]
    all_logits = []
    for _ in range(num_tokens):
        logits = _step(
            model, builder, [(r, r.num_tokens - r.num_computed_tokens) for r in requests]
        )
        for request, token_id in zip(requests, logits.argmax(-1).tolist(), strict=True):
            request.num_computed_tokens = request.num_tokens
            request.token_ids.append(token_id)
        all_logits.append(logits)
    outputs = [request.token_ids[request.num_prompt_tokens :] for request in requests]
    return outputs, torch.stack(all_logits)


def _step(model: CausalLM, builder: BatchBuilder, chosen: list[tuple[Request, int]]) -> Tensor:
    scheduled = [ScheduledRequest(request, count) for request, count in chosen]
    batch = builder.build(scheduled)
    hidden = model(batch.input_ids, batch.positions, batch.kv)
    last = batch.kv.cu_seqlens_q[1:].long() - 1
    return model.logits(hidden.index_select(0, last)).float()
