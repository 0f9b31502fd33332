"""DeepSeek's fields of a config.json: latent attention and its mixture of experts."""

from engine.architectures import Architecture
from engine.checkpoint.fields import Json, read_int, require
from engine.checkpoint.rope_config import yarn_attention_factor
from engine.config import MLAConfig, MoEConfig, RopeConfig
from engine.errors import UnsupportedModel, WeightsError
from kernels.gating import Gating

DEEPSEEK: frozenset[Architecture] = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"})


def parse_mla_config(config: Json, rope: RopeConfig) -> MLAConfig:
    """Read the widths, and the scale of the scores: yarn's mscale counts on q and on k.

    Raises: UnsupportedModel: rope_interleave is false. WeightsError: a field is missing.
    """
    require(config, "rope_interleave", True, True)
    nope, rope_dim = read_int(config, "qk_nope_head_dim"), read_int(config, "qk_rope_head_dim")
    scaling: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
    mscale = 1.0
    if rope.rope_type != "default" and (mscale_all_dim := scaling.get("mscale_all_dim")):
        mscale = yarn_attention_factor(rope.factor, float(mscale_all_dim))
    q_lora_rank = config.get("q_lora_rank")
    return MLAConfig(
        q_lora_rank=None if q_lora_rank is None else int(q_lora_rank),
        kv_lora_rank=read_int(config, "kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope_dim,
        v_head_dim=read_int(config, "v_head_dim"),
        softmax_scale=(nope + rope_dim) ** -0.5 * mscale**2,
    )


def parse_deepseek_moe_config(config: Json, architecture: Architecture) -> MoEConfig | None:
    """Read the experts; None for a model without.

    Raises: UnsupportedModel: a way of choosing experts that is not built.
        WeightsError: a field is missing or contradicts another.
    """
    if config.get("n_routed_experts") is None:
        return None
    num_experts, width = (
        read_int(config, "n_routed_experts"),
        read_int(config, "moe_intermediate_size"),
    )
    is_v3 = architecture == "DeepseekV3ForCausalLM"
    gating = _v3_gating(config) if is_v3 else _v2_gating(config)
    check_groups(gating, num_experts)
    first, freq = (
        int(config.get("first_k_dense_replace") or 0),
        int(config.get("moe_layer_freq") or 1),
    )
    num_layers = read_int(config, "num_hidden_layers") + num_mtp_layers(config)
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=gating.num_experts_per_tok,
        intermediate_size=width,
        norm_topk_prob=gating.is_normalized,
        layers=frozenset(i for i in range(first, num_layers) if i % freq == 0),
        gating=gating,
        has_correction_bias=is_v3,
        shared_intermediate_size=width * int(config.get("n_shared_experts") or 0),
    )


def num_mtp_layers(config: Json) -> int:
    """Layers after the last that predict tokens further ahead; they are sparse."""
    return int(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0)


def _v2_gating(config: Json) -> Gating:
    require(config, "scoring_func", "softmax", "softmax")
    require(config, "norm_topk_prob", False, False)
    method = require(config, "topk_method", "greedy", "greedy", "group_limited_greedy")
    is_limited = method == "group_limited_greedy"
    return Gating(
        num_experts_per_tok=read_int(config, "num_experts_per_tok"),
        num_groups=read_int(config, "n_group") if is_limited else 1,
        num_groups_per_tok=read_int(config, "topk_group") if is_limited else 1,
        scaling_factor=float(config.get("routed_scaling_factor") or 1.0),
    )


def _v3_gating(config: Json) -> Gating:
    require(config, "scoring_func", "sigmoid", "sigmoid")
    require(config, "topk_method", "noaux_tc", "noaux_tc")
    return Gating(
        num_experts_per_tok=read_int(config, "num_experts_per_tok"),
        scoring="sigmoid",
        num_groups=int(config.get("n_group") or 1),
        num_groups_per_tok=int(config.get("topk_group") or 1),
        group_scoring="top2_sum",
        is_normalized=bool(config.get("norm_topk_prob", True)),
        scaling_factor=float(config.get("routed_scaling_factor") or 1.0),
    )


def check_groups(gating: Gating, num_experts: int) -> None:
    """Raises: WeightsError, UnsupportedModel: the numbers of groups and experts do not fit."""
    if num_experts % gating.num_groups:
        raise WeightsError(
            f"n_routed_experts is {num_experts}, no multiple of n_group {gating.num_groups}"
        )
    size = num_experts // gating.num_groups
    if gating.num_groups > 1 and gating.group_scoring == "top2_sum" and size < 2:
        raise UnsupportedModel(f"n_group is {gating.num_groups} of {num_experts} experts, too many")
    available = size * gating.num_groups_per_tok
    if not 1 <= gating.num_groups_per_tok <= gating.num_groups:
        raise WeightsError(
            f"topk_group is {gating.num_groups_per_tok} of {gating.num_groups} groups"
        )
    if not 1 <= gating.num_experts_per_tok <= available:
        raise WeightsError(
            f"num_experts_per_tok is {gating.num_experts_per_tok}, "
            f"{available} experts can be chosen"
        )
