"""The frame that every decoder shares: embedding, pre-norm layers, final norm, vocabulary.

A family's file says what its layer is made of, as a `BuildLayer`; nothing else differs.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from engine.batch import KVBatch
from engine.config import ModelConfig
from engine.layers.attention import Attention, OnLayer
from engine.layers.embedding import Embedding, LMHead
from engine.layers.mla import MLAttention
from engine.layers.mlp import GatedMLP
from engine.layers.moe import MoE
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.layers.rows import rows_of
from engine.parallel import Parallel
from kernels.ops import Ops


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with the sum carried as `residual`."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        *,
        self_attn: Attention | MLAttention,
        mlp: GatedMLP | MoE,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, name="input_layernorm", ops=ops)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(size, eps, name="post_attention_layernorm", ops=ops)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        kv: KVBatch,
        on_layer: OnLayer | None,
    ) -> tuple[Tensor, Tensor]:
        """x, residual: [T, hidden_size]; x is what the last layer adds. -> the same of this one.

        Rows are as engine.layers.rows says: all of them, or this rank's.
        """
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, rotary, kv, on_layer)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


BuildLayer = Callable[[ModelConfig, int, Ops, Parallel], DecoderLayer]
"""A family: makes this rank's part of layer i of a model of its config."""


class Decoder(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(
        self, config: ModelConfig, ops: Ops, build_layer: BuildLayer, parallel: Parallel
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self._ops = ops
        self._rows = rows_of(parallel)
        self.embed_tokens = Embedding(
            config.vocab_size, size, name="embed_tokens", ops=ops, parallel=parallel
        )
        self.rotary_emb = RotaryEmbedding(
            config.rope, config.rotary_dim, config.max_position_embeddings, ops=ops
        )
        self.layers = nn.ModuleList(
            build_layer(config, layer_idx, ops, parallel) for layer_idx in range(config.num_layers)
        )
        self.norm = RMSNorm(size, config.rms_norm_eps, name="norm", ops=ops)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv: KVBatch, on_layer: OnLayer | None
    ) -> Tensor:
        """input_ids, positions: [T] -> [T, hidden_size]."""
        rotary = self.rotary_emb(positions)
        slots = self._ops.slot_index(kv.slot_mapping, kv.k_caches[0], kv.v_caches[0])
        kv = replace(kv, slot_mapping=slots)
        x: Tensor = self.embed_tokens(input_ids)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, rotary, kv, on_layer)
        assert residual is not None, "a model has layers"
        x, _ = self.norm.add(x, residual)
        return self._rows.gather(x, len(input_ids))


class DecoderForCausalLM(nn.Module):
    """The model and its projection to the vocabulary."""

    def __init__(
        self, config: ModelConfig, ops: Ops, build_layer: BuildLayer, parallel: Parallel
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, ops, build_layer, parallel)
        self.lm_head = LMHead(
            config.vocab_size,
            config.hidden_size,
            name="lm_head",
            tied=self.model.embed_tokens if config.tie_word_embeddings else None,
            ops=ops,
            parallel=parallel,
        )

    @property
    def unused_prefixes(self) -> tuple[str, ...]:
        """What the names of weights start with that a checkpoint may hold and nobody reads."""
        first = self.config.num_layers
        return tuple(f"model.layers.{i}." for i in range(first, first + self.config.num_mtp_layers))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVBatch,
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        """input_ids, positions: [T] -> hidden [T, hidden_size]; writes this step's KV."""
        hidden: Tensor = self.model(input_ids, positions, kv, on_layer)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden_size] -> [R, vocab_size]."""
        logits: Tensor = self.lm_head(hidden)
        return logits
