"""Hugging Face's config.json as a `ModelConfig`; the one place that knows its spellings."""

from engine.architectures import ARCHITECTURES, Architecture
from engine.checkpoint.deepseek_config import (
    DEEPSEEK,
    num_mtp_layers,
    parse_deepseek_moe_config,
    parse_mla_config,
)
from engine.checkpoint.fields import Json, read_int
from engine.checkpoint.rope_config import parse_rope_config
from engine.checkpoint.window_config import parse_windows
from engine.config import ModelConfig, MoEConfig
from engine.errors import UnsupportedModel, WeightsError

SPARSE = frozenset({"Qwen3MoeForCausalLM"})
"""Architectures with experts."""

# What a config without head_dim means, where it is not hidden_size / num_heads.
_HEAD_DIMS = {"Qwen3ForCausalLM": 128}


def parse_model_config(config: Json, generation: Json | None = None) -> ModelConfig:
    """Read config.json and, if there is one, generation_config.json, whose EOS ids are added.

    Raises: UnsupportedModel: an architecture, activation or rope type that is not built.
        WeightsError: a field is missing or contradicts another.
    """
    generation = generation or {}
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act is {act!r}, supported: silu")
    architecture = _architecture(config)
    hidden_size, num_heads = (
        read_int(config, "hidden_size"),
        read_int(config, "num_attention_heads"),
    )
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise WeightsError(f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads")
    max_position_embeddings = int(config.get("max_position_embeddings", 2048))
    rope = parse_rope_config(config, max_position_embeddings)
    mla = parse_mla_config(config, rope) if architecture in DEEPSEEK else None
    if mla is not None:
        head_dim, num_kv_heads = mla.qk_nope_head_dim + mla.qk_rope_head_dim, 1
    else:
        head_dim = _head_dim(config, architecture, hidden_size // num_heads)
    window, window_layers = parse_windows(config, architecture)
    return ModelConfig(
        architecture=architecture,
        vocab_size=read_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_int(config, "intermediate_size"),
        num_layers=read_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        moe=_moe_config(config, architecture),
        sliding_window=window,
        window_layers=window_layers,
        mla=mla,
        num_mtp_layers=num_mtp_layers(config) if architecture in DEEPSEEK else 0,
        bos_token_id=config.get("bos_token_id"),
        eos_token_ids=_token_ids(config) | _token_ids(generation),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
    )


def _moe_config(config: Json, architecture: Architecture) -> MoEConfig | None:
    if architecture in DEEPSEEK:
        return parse_deepseek_moe_config(config, architecture)
    if architecture == "MixtralForCausalLM":
        return _mixtral_moe_config(config)
    return parse_moe_config(config) if architecture in SPARSE else None


def _head_dim(config: Json, architecture: Architecture, default: int) -> int:
    return int(config.get("head_dim") or _HEAD_DIMS.get(architecture, default))


def _experts(config: Json) -> tuple[int, int]:
    num_experts = read_int(
        config, "num_experts" if "num_experts" in config else "num_local_experts"
    )
    num_experts_per_tok = read_int(config, "num_experts_per_tok")
    if not 1 <= num_experts_per_tok <= num_experts:
        raise WeightsError(f"num_experts_per_tok is {num_experts_per_tok} of {num_experts} experts")
    return num_experts, num_experts_per_tok


def _mixtral_moe_config(config: Json) -> MoEConfig:
    num_experts, num_experts_per_tok = _experts(config)
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=read_int(config, "intermediate_size"),
        norm_topk_prob=True,
        layers=frozenset(range(read_int(config, "num_hidden_layers"))),
    )


def parse_moe_config(config: Json) -> MoEConfig:
    """Read the experts and which layers have them; transformers 5 writes num_local_experts.

    Raises: WeightsError: a field is missing or contradicts another.
    """
    num_experts = read_int(
        config, "num_experts" if "num_experts" in config else "num_local_experts"
    )
    num_experts_per_tok = read_int(config, "num_experts_per_tok")
    if not 1 <= num_experts_per_tok <= num_experts:
        raise WeightsError(f"num_experts_per_tok is {num_experts_per_tok} of {num_experts} experts")
    step = int(config.get("decoder_sparse_step", 1))
    if step < 1:
        raise WeightsError(f"decoder_sparse_step is {step}, must be at least 1")
    dense = frozenset(config.get("mlp_only_layers") or ())
    num_layers = read_int(config, "num_hidden_layers")
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=num_experts_per_tok,
        intermediate_size=read_int(config, "moe_intermediate_size"),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        layers=frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
    )


def _architecture(config: Json) -> Architecture:
    architectures = config.get("architectures") or []
    if len(architectures) != 1:
        raise WeightsError(f"config.json names {len(architectures)} architectures, needs one")
    for architecture in ARCHITECTURES:
        if architecture == architectures[0]:
            return architecture
    supported = ", ".join(sorted(ARCHITECTURES))
    raise UnsupportedModel(f"architecture is {architectures[0]}, supported: {supported}")


def _token_ids(config: Json) -> frozenset[int]:
    value = config.get("eos_token_id")
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset({value})
