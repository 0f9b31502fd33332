"""Drafts of the model's own MTP layers.

    depth d, position i:  state of depth d - 1 (of the model for 0), token i + d + 1
                          --> state --> draft of token i + d + 2

After a step the layers are run on every token that the step computed and the request kept, so that
their KV is there for all tokens but the newest, as the other layers' is. On a prefiller that KV
moves with the rest, and the drafts go along with the first token: the decoder's first step verifies
them. More drafts than layers come from the last one, again and again.

The last d positions of depth d are computed with drafts, for want of tokens. The next time they are
computed anew with the right ones, from a state that was kept, unless their block is full: then
others may share it, or it was sent.

NOTE: the KV of a block's last tokens depends on the tokens after them, which the block's hash does
not cover. A block from the prefix cache may hold another continuation's, which costs a draft its
success at most, never a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import BatchBuilder, KVBatch, Span
from engine.config import ModelConfig
from engine.layers.attention import OnLayer
from engine.request import Request, RequestKey
from engine.scheduler import Scheduler
from engine.speculation import ComputedRows
from kernels.kv_cache import KVCache


class DraftingModel(Protocol):
    """What drafting needs of a model; see engine.models.decoder.DecoderForCausalLM."""

    @property
    def config(self) -> ModelConfig:
        """What it was built from."""
        ...

    def draft(
        self,
        next_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        kv: KVBatch,
        on_layer: OnLayer | None = None,
        depth: int = 0,
    ) -> Tensor:
        """One MTP layer."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden_size] -> [R, vocab_size]."""
        ...


@dataclass(slots=True)
class _Line:
    """Rows of one request on their way through the depths."""

    request: Request
    first_block: int
    """Where the first block starts that is not full."""
    start: int
    """Position of the first row."""
    states: Tensor
    """[rows, hidden_size], of the depth before."""

    def token_ids(self, depth: int) -> list[int]:
        """The tokens ahead of each row; the last known one in the place of those to come."""
        known = self.request.token_ids + self.request.draft_token_ids
        first = self.start + depth + 1
        found = known[first : first + len(self.states)]
        return found + known[-1:] * (len(self.states) - len(found))

    @property
    def draft_token_ids(self) -> list[int]:
        """Of its request."""
        return self.request.draft_token_ids


@dataclass(frozen=True, slots=True)
class _Kept:
    """A state that is final, and whose next depth is not."""

    position: int
    state: Tensor
    """[1, hidden_size]."""


class MTPDrafter:
    """Implements `engine.speculation.Drafter`; owns its batch buffers."""

    def __init__(
        self,
        model: DraftingModel,
        scheduler: Scheduler,
        k_caches: Sequence[KVCache],
        v_caches: Sequence[KVCache],
        block_size: int,
    ) -> None:
        self._model = model
        self._num_depths = model.config.num_draft_layers
        self._scheduler = scheduler
        self._block_size = block_size
        self._batches = BatchBuilder(k_caches, v_caches, block_size)
        self._kept: dict[tuple[RequestKey, int], _Kept] = {}

    @torch.inference_mode()
    def propose(
        self, computed: Sequence[ComputedRows], hidden: Tensor, on_layer: OnLayer | None
    ) -> None:
        """See `Drafter.propose`; on_layer is told of the MTP layers."""
        if not computed:
            return
        lines = [self._line(part, hidden) for part in computed]
        kept: dict[tuple[RequestKey, int], _Kept] = {}
        for depth in range(self._num_depths):
            if depth:
                for line in lines:
                    self._prepend_kept(line, depth)
            self._advance(lines, depth, on_layer)
            self._append_drafts([line for line in lines if self._wants_draft(line.request)])
            for line in lines:
                position = line.start + len(line.states) - 1 - depth
                if depth + 1 < self._num_depths and position >= line.start:
                    state = line.states[position - line.start][None].clone()
                    kept[line.request.key, depth + 1] = _Kept(position, state)
        self._kept = kept
        self._draft_further(lines)

    def _line(self, part: ComputedRows, hidden: Tensor) -> _Line:
        request, start = part.request, part.start
        known = request.num_tokens - start - 1
        assert known >= part.num_rows, f"{request.key} has no token after its last"
        request.draft_token_ids = []
        rows = hidden[part.first_row : part.first_row + part.num_rows]
        return _Line(request, start // self._block_size * self._block_size, start, rows)

    def _prepend_kept(self, line: _Line, depth: int) -> None:
        kept = self._kept.get((line.request.key, depth))
        if kept is not None and kept.position == line.start - 1 >= line.first_block:
            line.start -= 1
            line.states = torch.cat([kept.state, line.states])

    def _advance(self, lines: Sequence[_Line], depth: int, on_layer: OnLayer | None) -> None:
        spans = [Span(line.request, line.start, line.token_ids(depth), 1) for line in lines]
        hidden = torch.cat([line.states for line in lines])
        batch = self._batches.build_spans(spans)
        states = self._model.draft(
            batch.input_ids, batch.positions, hidden, batch.kv, on_layer, depth
        )
        sizes = [len(line.states) for line in lines]
        for line, part in zip(lines, torch.split(states, sizes), strict=True):
            line.states = part

    def _append_drafts(self, lines: Sequence[_Line]) -> None:
        if not lines:
            return
        logits = self._model.logits(torch.cat([line.states[-1:] for line in lines]))
        for line, token_id in zip(lines, logits.argmax(dim=-1).tolist(), strict=True):
            line.draft_token_ids.append(token_id)

    def _draft_further(self, lines: Sequence[_Line]) -> None:
        """By the last depth, each time one position on, on its own state and draft."""
        depth = self._num_depths - 1
        for line in lines:
            line.start += len(line.states)
            line.states = line.states[-1:]
        while lines := [line for line in lines if self._goes_further(line)]:
            self._advance(lines, depth, None)
            self._append_drafts(lines)
            for line in lines:
                line.start += 1

    def _goes_further(self, line: _Line) -> bool:
        """Whether it can use one more, and its blocks have room for the KV."""
        has_slot = line.start < len(line.request.block_ids) * self._block_size
        return has_slot and self._wants_draft(line.request)

    def _wants_draft(self, request: Request) -> bool:
        if request.num_tokens - request.num_computed_tokens != 1 or request.finish_reason:
            return False
        return len(request.draft_token_ids) < self._scheduler.limits.num_drafts_allowed(request)
