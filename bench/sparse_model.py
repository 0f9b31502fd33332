"""The mixture of experts that benchmarks of ranks compute."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine.config import ModelConfig, MoEConfig

BLOCK_SIZE = 32


def model_config(args: argparse.Namespace) -> ModelConfig:
    """Qwen3-MoE's kind of layer, all of them sparse."""
    return ModelConfig(
        architecture="Qwen3MoeForCausalLM",
        vocab_size=256,
        hidden_size=args.hidden_size,
        intermediate_size=args.width,
        num_layers=args.layers,
        num_heads=8,
        num_kv_heads=8,
        head_dim=args.hidden_size // 8,
        moe=MoEConfig(
            num_experts=args.experts,
            num_experts_per_tok=args.top_k,
            intermediate_size=args.width,
            norm_topk_prob=True,
            layers=frozenset(range(args.layers)),
        ),
    )
