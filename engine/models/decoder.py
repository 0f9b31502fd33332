"""The frame that every decoder shares: embedding, pre-norm layers, final norm, vocabulary.

A family's file says what its layer is made of, as a `BuildLayer`; nothing else differs.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from engine.batch import KVBatch
from engine.config import ModelConfig
from engine.context_parallel import ContextParallel
from engine.dual_batch import Half, dummy_like, halves_of, on_layer_of_both
from engine.expert_balancer import BalanceStats, ExpertBalancer
from engine.layer_sharding import ShardedBytes, shard_layers
from engine.layers.attention import OnLayer
from engine.layers.embedding import Embedding, LMHead
from engine.layers.moe import MoE, active_rows
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.layers.rows import rows_of
from engine.models.layer import BuildLayer
from engine.models.mtp import MTPLayer
from engine.parallel import Parallel
from engine.stages import stage_of
from kernels.ops import Ops


class Decoder(nn.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(
        self, config: ModelConfig, ops: Ops, build_layer: BuildLayer, parallel: Parallel
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self._ops = ops
        self._parallel = parallel
        self._rows = rows_of(parallel)
        self._turns, self._step = parallel.turns, parallel.step
        self._shards_layers = bool(parallel.config.layer_sharding)
        self._stage, self._link = stage_of(config.num_layers, parallel.config), parallel.link
        self.embed_tokens: Embedding | None = None
        if self._stage.is_first:
            self.embed_tokens = Embedding(
                config.vocab_size, size, name="embed_tokens", ops=ops, parallel=parallel
            )
        self.rotary_emb = RotaryEmbedding(
            config.rope, config.rotary_dim, config.max_position_embeddings, ops=ops
        )
        self._main_layers = [build_layer(config, i, ops, parallel) for i in self._stage.layers]
        # NOTE: in the place of layers of other stages, so that names are the checkpoint's.
        self.layers = nn.ModuleList(nn.Identity() for _ in range(self._stage.layers.start))
        self.layers.extend(self._main_layers)
        self._mtp = [
            MTPLayer(config, ops, build_layer(config, layer_idx, ops, parallel), self._rows)
            for layer_idx in range(config.num_layers, config.num_kv_layers)
        ]
        self.layers.extend(self._mtp)
        self.norm = None
        if self._stage.is_last:
            self.norm = RMSNorm(size, config.rms_norm_eps, name="norm", ops=ops)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv: KVBatch, on_layer: OnLayer | None
    ) -> Tensor:
        """input_ids, positions: [T] -> [T, hidden_size]; in a stage that is not the last: the rows
        that it sent to the next.
        """
        whole = Half(input_ids, positions, kv)
        if self._turns is None or not self._step.cut:
            return self._pass(whole, on_layer)
        first, second = halves_of(*whole, self._step.cut)
        on_layer = on_layer_of_both(on_layer)

        def run_second() -> Tensor:
            self._ops.bind_thread()
            return self._pass(second or dummy_like(first), on_layer)

        hidden = self._turns.run(partial(self._pass, first, on_layer), run_second)
        return hidden[0] if second is None else torch.cat(hidden)

    def _pass(self, batch: Half, on_layer: OnLayer | None) -> Tensor:
        input_ids, positions, kv = batch
        rotary = self.rotary_emb(positions)
        slots = self._ops.slot_index(kv.slot_mapping, kv.k_caches[0], kv.v_caches[0])
        kv = replace(kv, slot_mapping=slots, active=active_rows(kv.slot_mapping, self._parallel))
        x = self._first_rows(input_ids)
        residual: Tensor | None = None
        for layer in self._main_layers:
            x, residual = layer(x, residual, rotary, kv, on_layer)
            if self._turns is not None and self._shards_layers:
                # NOTE: or dense layers would let a half run ahead of the weights of the other.
                self._turns.pass_on()
        assert residual is not None, "a model has layers"
        if self.norm is None:
            assert self._link is not None, "there is a stage after this one"
            rows = x + residual
            self._link.send(rows)
            return rows
        x, _ = self.norm.add(x, residual)
        return self._rows.gather(x, len(input_ids))

    def _first_rows(self, token_ids: Tensor) -> Tensor:
        """What the first layer of this rank takes."""
        if self.embed_tokens is not None:
            embedded: Tensor = self.embed_tokens(token_ids)
            return embedded
        assert self._link is not None, "there is a stage before this one"
        weight = self._main_layers[0].input_layernorm.weight
        num_rows = self._rows.num_own(len(token_ids))
        return self._link.receive(num_rows, len(weight), weight.dtype, token_ids.device)

    def draft(
        self,
        next_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        kv: KVBatch,
        on_layer: OnLayer | None,
        depth: int,
    ) -> Tensor:
        """MTP layer `depth` on states of tokens, and tokens after them; see `MTPLayer`."""
        slots = self._ops.slot_index(kv.slot_mapping, kv.k_caches[0], kv.v_caches[0])
        kv = replace(kv, slot_mapping=slots)
        states: Tensor = self._mtp[depth](
            self._first_rows(next_ids), hidden, self.rotary_emb(positions), kv, on_layer
        )
        return states


class DecoderForCausalLM(nn.Module):
    """The model and its projection to the vocabulary."""

    def __init__(
        self, config: ModelConfig, ops: Ops, build_layer: BuildLayer, parallel: Parallel
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, ops, build_layer, parallel)
        self._stage = stage_of(config.num_layers, parallel.config)
        self.lm_head: LMHead | None = None
        if self._stage.is_first:
            self.lm_head = LMHead(
                config.vocab_size,
                config.hidden_size,
                name="lm_head",
                tied=self.model.embed_tokens if config.tie_word_embeddings else None,
                ops=ops,
                parallel=parallel,
            )
        self._balancer: ExpertBalancer | None = None
        if config.moe is not None and parallel.config.ep_size > 1 and parallel.config.eplb.is_on:
            self._balancer = ExpertBalancer(self._sparse_layers(), config.moe, parallel)

        self._series = shard_layers(self, parallel)
        self._context = ContextParallel(parallel) if parallel.config.cp_size > 1 else None

    def sharded_bytes(self) -> ShardedBytes:
        """Of layer sharding, once the weights are loaded."""
        found = [series.num_bytes() for series in self._series]
        return ShardedBytes(sum(n.whole for n in found), sum(n.held for n in found))

    @property
    def balance_stats(self) -> BalanceStats:
        """Of the load of this rank's experts."""
        return BalanceStats() if self._balancer is None else self._balancer.stats

    def _sparse_layers(self) -> dict[int, MoE]:
        """By index of their layer, model.layers.<index>."""
        return {
            int(path.split(".")[2]): module
            for path, module in self.named_modules()
            if isinstance(module, MoE)
        }

    @property
    def unused_prefixes(self) -> tuple[str, ...]:
        """What the names of weights start with that a checkpoint may hold and nobody reads."""
        config = self.config
        after = config.num_layers + config.num_mtp_layers
        unused = tuple(f"model.layers.{i}." for i in range(config.num_kv_layers, after))
        for i in range(config.num_layers, config.num_kv_layers):  # copies of the model's own
            unused += (f"model.layers.{i}.embed_tokens.", f"model.layers.{i}.shared_head.head.")
        return unused + self._stage.unused_prefixes(config.num_layers)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVBatch,
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        """input_ids, positions: [T] -> hidden [T, hidden_size]; writes this step's KV.

        With context parallelism every rank is given all rows.
        In a stage of a pipeline that is not the last, the result is what the next one takes.
        """
        if self._balancer is not None:
            # NOTE: here, since nothing else is called by every rank equally often.
            self._balancer.before_step()
        if self._context is not None:
            return self._context.run(self.model, input_ids, positions, kv, on_layer)
        hidden: Tensor = self.model(input_ids, positions, kv, on_layer)
        return hidden

    def draft(
        self,
        next_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        kv: KVBatch,
        on_layer: OnLayer | None = None,
        depth: int = 0,
    ) -> Tensor:
        """States [T, hidden_size] that `logits` turns into those of a token further ahead.

        next_ids: [T], the token `depth` + 1 after each position; hidden: [T, hidden_size], of
        `forward` for depth 0, else of the depth before. Writes the KV of that MTP layer.
        """
        states: Tensor = self.model.draft(next_ids, positions, hidden, kv, on_layer, depth)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden_size] -> [R, vocab_size]; in the first stage of a pipeline."""
        assert self.lm_head is not None, "only the first stage has the vocabulary"
        logits: Tensor = self.lm_head(hidden)
        return logits
