"""What the engine knows of the model it runs. How a worker runs it is in engine.worker.config."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from engine.architectures import Architecture
from kernels.gating import Gating

RopeType = Literal["default", "linear", "llama3", "yarn"]

Quantization = Literal["auto", "none", "int8", "int4", "native"]
"""How weights are held; what they are multiplied with is the backend's choice.

auto:   native on CPUs; none elsewhere.
none:   in float, whatever the checkpoint holds.
int8:   rounded at load, symmetric, one scale per output.
int4:   rounded at load, a scale and an offset for 32 inputs; the vocabulary as int8.
native: as the checkpoint holds them, so exactly: in few bits, or in 16; the rest in float.
"""

KVCacheDtype = Literal["auto", "int8"]
"""How the KV cache is held: as the backend computes, or in int8 with a scale per token and head."""

Speculation = Literal["none", "ngram", "mtp"]
"""Where drafts come from: nowhere, earlier places in the text, or the model's own MTP layer."""


AsyncScheduling = Literal["auto", "on", "off"]
"""Whether the next step is prepared while one runs.

auto: where the device works beside the host, as NPUs do; not on CPUs, where both share the cores
and a step takes as long either way (bench/bench_async.py).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding and how it is stretched beyond the trained context."""

    rope_type: RopeType = "default"
    """Kind of scaling."""
    theta: Annotated[float, Gt(0)] = 10000.0
    """Base of the wavelengths."""
    factor: Annotated[float, Gt(0)] = 1.0
    """By how much the context is stretched; unused by `default`."""
    original_max_position_embeddings: Annotated[int, Ge(1)] = 8192
    """Context that the model was trained with; for llama3 and yarn."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / low_freq_factor are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / high_freq_factor are kept."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this within the original context are kept."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are stretched in full."""
    attention_factor: float = 1.0
    """yarn: multiplies cos and sin."""
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions."""
    divisors: tuple[float, ...] = ()
    """Per frequency, on top of the rest: GGUF's form of llama3; empty means none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """The sparse layers of a mixture-of-experts model."""

    num_experts: Annotated[int, Ge(1)]
    """Experts of a sparse layer."""
    num_experts_per_tok: Annotated[int, Ge(1)]
    """How many of them compute a token; at most num_experts."""
    intermediate_size: Annotated[int, Ge(1)]
    """Width of an expert."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts are scaled to sum to one."""
    layers: frozenset[int]
    """Which layers are sparse; the others have a dense MLP."""
    gating: Gating | None = None
    """DeepSeek's choice of experts; None: top-k of a softmax."""
    has_correction_bias: bool = False
    """Whether the router has a bias that counts for the choice alone."""
    shared_intermediate_size: int = 0
    """Width of the shared experts together, which compute every token; 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAConfig:
    """Multi-head latent attention: one latent per token stands for the keys and values."""

    q_lora_rank: int | None
    """Width of the queries' latent; None: queries are projected in one go."""
    kv_lora_rank: Annotated[int, Ge(1)]
    """Width of the latent in the cache."""
    qk_nope_head_dim: Annotated[int, Ge(1)]
    """Part of a head of q and k without position."""
    qk_rope_head_dim: Annotated[int, Ge(2)]
    """Part with position; its key is shared by all heads and lies in the cache."""
    v_head_dim: Annotated[int, Ge(1)]
    """Width of a head's values."""
    softmax_scale: float
    """Of the scores, yarn's mscale included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One model, as its config.json or its GGUF metadata describes it."""

    architecture: Architecture
    """Class name."""
    vocab_size: Annotated[int, Ge(1)]
    """Rows of the embedding."""
    hidden_size: Annotated[int, Ge(1)]
    """Width of the residual stream."""
    intermediate_size: Annotated[int, Ge(1)]
    """Width of the MLP."""
    num_layers: Annotated[int, Ge(1)]
    """Decoder layers."""
    num_heads: Annotated[int, Ge(1)]
    """Query heads."""
    num_kv_heads: Annotated[int, Ge(1)]
    """Key and value heads; divides num_heads."""
    head_dim: Annotated[int, Ge(2)]
    """Width of a head of q and k."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square."""
    rope: RopeConfig = RopeConfig()
    """Position embedding."""
    max_position_embeddings: Annotated[int, Ge(1)] = 2048
    """Longest context."""
    tie_word_embeddings: bool = False
    """Whether the output projection is the embedding."""
    attention_bias: bool = False
    """Whether q, k, v and o projections have a bias."""
    mlp_bias: bool = False
    """Whether the MLP's projections have a bias."""
    moe: MoEConfig | None = None
    """Its sparse layers; None if all are dense."""
    mla: MLAConfig | None = None
    """Its latent attention; None: grouped-query attention."""
    sliding_window: Annotated[int, Ge(0)] = 0
    """Keys that a query of the window layers sees, its own included; 0: there are none."""
    window_layers: frozenset[int] = frozenset()
    """Layers that attend with the window; the others see all keys."""
    num_mtp_layers: Annotated[int, Ge(0)] = 0
    """Layers after the last that predict tokens further ahead, in the files."""
    num_draft_layers: Annotated[int, Ge(0)] = 0
    """How many of these are used, from the first."""
    bos_token_id: int | None = None
    """Put before a prompt by tokenizers that do."""
    eos_token_ids: frozenset[int] = frozenset()
    """Any of these ends a generation."""
    dtype: str = "float32"
    """Type of the weights in the files; computation is in float32."""

    def window(self, layer_idx: int) -> int:
        """The window of a layer, as `Ops.paged_attention` takes it."""
        return self.sliding_window if layer_idx in self.window_layers else 0

    @property
    def num_kv_layers(self) -> int:
        """Layers with a KV cache."""
        return self.num_layers + self.num_draft_layers

    @property
    def rotary_dim(self) -> int:
        """Width of a head that is rotated."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim
