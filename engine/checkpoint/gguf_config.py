"""The metadata of a GGUF file as a `ModelConfig`.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md), and what llama.cpp's converter writes
for these architectures.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from engine.architectures import GGUF_ARCHITECTURES, Architecture
from engine.checkpoint.config import SPARSE
from engine.checkpoint.deepseek_config import DEEPSEEK, check_groups
from engine.checkpoint.rope_config import yarn_attention_factor
from engine.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig, RopeType
from engine.errors import UnsupportedModel, WeightsError
from kernels.gating import Gating
from protos.gguf_header import GGUFHeader, Value

_ROPE_TYPES: dict[str, RopeType] = {"none": "default", "linear": "linear", "yarn": "yarn"}
_SOFTMAX, _SIGMOID = 1, 2


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Values of one file, by what follows the architecture in their keys."""

    path: Path
    header: GGUFHeader
    architecture: str

    def number(self, key: str, default: float | None = None) -> float:
        """Raises: WeightsError: there is none."""
        value: Value | None = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, int | float):
            raise WeightsError(f"{self.path} has no number {self.architecture}.{key}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """The same, as an int."""
        return int(self.number(key, default))

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return f"{self.architecture}.{key}" in self.header.metadata

    @property
    def num_layers(self) -> int:
        """Without those for drafts."""
        return self.integer("block_count") - self.integer("nextn_predict_layers", 0)


def gguf_model_config(path: Path, header: GGUFHeader) -> ModelConfig:
    """Read the metadata; `path` is for errors. Divisors of frequencies are tensors, not read here.

    Raises: UnsupportedModel: the architecture, or a value, is not built.
        WeightsError: a value is missing.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise WeightsError(f"{path} has no text general.architecture")
    if name not in GGUF_ARCHITECTURES:
        supported = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise UnsupportedModel(
            f"general.architecture is {name!r} in {path}, supported: {supported}"
        )
    if (num_files := header.metadata.get("split.count", 1)) not in (0, 1):
        raise UnsupportedModel(f"{path} is one of {num_files} files; merge them first")
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise WeightsError(f"{path} has no tensor token_embd.weight")
    file = _Metadata(path, header, name)
    architecture = _architecture(file)
    num_heads = file.integer("attention.head_count")
    context_length = file.integer("context_length")
    mla = _mla_config(file) if architecture in DEEPSEEK else None
    if mla is not None:
        head_dim, num_kv_heads = mla.qk_nope_head_dim + mla.qk_rope_head_dim, 1
    else:
        head_dim = _head_dim(file, num_heads)
        num_kv_heads = file.integer("attention.head_count_kv", num_heads)
    bos = header.metadata.get("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=file.integer("embedding_length"),
        intermediate_size=file.integer("feed_forward_length"),
        num_layers=file.num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=file.number("attention.layer_norm_rms_epsilon"),
        rope=_rope_config(file, context_length, is_latent=mla is not None),
        max_position_embeddings=context_length,
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        moe=_moe_config(file, architecture, shapes),
        mla=mla,
        num_mtp_layers=file.integer("nextn_predict_layers", 0),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=_eos_token_ids(header),
        dtype="gguf",
    )


def _architecture(file: _Metadata) -> Architecture:
    """llama stands for Mixtral too, and deepseek2 for V3."""
    architecture = GGUF_ARCHITECTURES[file.architecture]
    if architecture == "LlamaForCausalLM" and file.integer("expert_count", 0):
        return "MixtralForCausalLM"
    if architecture in DEEPSEEK and _gating_function(file) == _SIGMOID:
        return "DeepseekV3ForCausalLM"
    return architecture


def _gating_function(file: _Metadata) -> int:
    function = file.integer("expert_gating_func", _SOFTMAX)
    if function not in (_SOFTMAX, _SIGMOID):
        raise UnsupportedModel(
            f"{file.architecture}.expert_gating_func is {function} in {file.path}, supported: "
            f"{_SOFTMAX} (softmax), {_SIGMOID} (sigmoid)"
        )
    return function


def _head_dim(file: _Metadata, num_heads: int) -> int:
    head_dim = file.integer("attention.key_length", file.integer("embedding_length") // num_heads)
    if (rope_dim := file.integer("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel(f"rope.dimension_count is {rope_dim}, head_dim {head_dim}")
    return head_dim


def _mla_config(file: _Metadata) -> MLAConfig:
    """Newer files have the widths of the cache as key_length, and those of a head beside them."""
    suffix = "_mla" if file.has("attention.key_length_mla") else ""
    key_length = file.integer(f"attention.key_length{suffix}")
    rope_dim = file.integer("rope.dimension_count")
    mscale = 1.0
    if file.header.metadata.get(f"{file.architecture}.rope.scaling.type") == "yarn":
        factor = file.number("rope.scaling.factor", 1.0)
        mscale += file.number("rope.scaling.yarn_log_multiplier", 0.0) * math.log(max(factor, 1.0))
    q_lora_rank = file.integer("attention.q_lora_rank", 0)
    return MLAConfig(
        q_lora_rank=q_lora_rank or None,
        kv_lora_rank=file.integer("attention.kv_lora_rank"),
        qk_nope_head_dim=key_length - rope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=file.integer(f"attention.value_length{suffix}"),
        softmax_scale=key_length**-0.5 * mscale**2,
    )


def _moe_config(
    file: _Metadata, architecture: Architecture, shapes: dict[str, tuple[int, ...]]
) -> MoEConfig | None:
    if architecture in DEEPSEEK:
        return _deepseek_moe_config(file, shapes)
    if architecture not in SPARSE and architecture != "MixtralForCausalLM":
        return None
    num_experts, k = _experts(file)
    width = "feed_forward_length" if architecture == "MixtralForCausalLM" else None
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=k,
        intermediate_size=file.integer(width or "expert_feed_forward_length"),
        # The format knows neither models without normalisation nor dense layers in qwen3moe.
        norm_topk_prob=True,
        layers=frozenset(range(file.num_layers)),
    )


def _deepseek_moe_config(file: _Metadata, shapes: dict[str, tuple[int, ...]]) -> MoEConfig | None:
    if not file.integer("expert_count", 0):
        return None
    num_experts, k = _experts(file)
    is_sigmoid = _gating_function(file) == _SIGMOID
    width = file.integer("expert_feed_forward_length")
    gating = Gating(
        num_experts_per_tok=k,
        scoring="sigmoid" if is_sigmoid else "softmax",
        num_groups=file.integer("expert_group_count", 1),
        num_groups_per_tok=file.integer("expert_group_used_count", 1),
        group_scoring="top2_sum" if is_sigmoid else "max",
        is_normalized=bool(
            file.header.metadata.get(f"{file.architecture}.expert_weights_norm", False)
        ),
        scaling_factor=file.number("expert_weights_scale", 1.0),
    )
    check_groups(gating, num_experts)
    first = file.integer("leading_dense_block_count", 0)
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=k,
        intermediate_size=width,
        norm_topk_prob=gating.is_normalized,
        layers=frozenset(range(first, file.integer("block_count"))),
        gating=gating,
        has_correction_bias=any(".exp_probs_b" in name for name in shapes),
        shared_intermediate_size=width * file.integer("expert_shared_count", 0),
    )


def _experts(file: _Metadata) -> tuple[int, int]:
    num_experts, k = file.integer("expert_count"), file.integer("expert_used_count")
    if not 1 <= k <= num_experts:
        raise WeightsError(f"{file.path} uses {k} of {num_experts} experts")
    return num_experts, k


def _rope_config(file: _Metadata, context_length: int, *, is_latent: bool) -> RopeConfig:
    number = file.number
    scaling = str(file.header.metadata.get(f"{file.architecture}.rope.scaling.type", "none"))
    if scaling not in _ROPE_TYPES:
        raise UnsupportedModel(
            f"rope.scaling.type is {scaling!r} in {file.path}, supported: {', '.join(_ROPE_TYPES)}"
        )
    factor = number("rope.scaling.factor", 1.0)
    attention_factor = 1.0
    # DeepSeek's two mscales, of which the file has one, cancel each other in cos and sin.
    if scaling == "yarn" and not is_latent:
        extra = number("rope.scaling.attn_factor", 1.0)
        attention_factor = extra * yarn_attention_factor(factor)
    return RopeConfig(
        rope_type=_ROPE_TYPES[scaling],
        theta=number("rope.freq_base", 10000.0),
        factor=factor,
        original_max_position_embeddings=file.integer(
            "rope.scaling.original_context_length", context_length
        ),
        beta_fast=number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention_factor,
    )


def _eos_token_ids(header: GGUFHeader) -> frozenset[int]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    values = (header.metadata.get(key) for key in keys)
    return frozenset(value for value in values if isinstance(value, int))
