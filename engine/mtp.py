"""Drafts of the model's own MTP layer.

    position i of the layer:  state h_i, token i + 1  -->  draft of token i + 2

After a step the layer is run on every token that the step computed and the request kept, so that
its KV is there for all tokens but the newest, as the other layers' is. On a prefiller that KV moves
with the rest, and the drafts go along with the first token: the decoder's first step verifies them.

NOTE: the layer's KV of the last token of a block depends on the token after it, which the block's
hash does not cover. A block from the prefix cache may hold another continuation's, which costs a
draft its success at most, never a token.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import BatchBuilder, KVBatch, Span
from engine.layers.attention import OnLayer
from engine.request import Request
from engine.scheduler import Scheduler
from engine.speculation import ComputedRows
from kernels.kv_cache import KVCache


class DraftingModel(Protocol):
    """What drafting needs of a model; see engine.models.decoder.DecoderForCausalLM."""

    def draft(
        self,
        next_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        kv: KVBatch,
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        """The MTP layer."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, hidden_size] -> [R, vocab_size]."""
        ...


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
        self._scheduler = scheduler
        self._block_size = block_size
        self._batches = BatchBuilder(k_caches, v_caches, block_size)

    @torch.inference_mode()
    def propose(
        self, computed: Sequence[ComputedRows], hidden: Tensor, on_layer: OnLayer | None
    ) -> None:
        """See `Drafter.propose`; on_layer is told of the MTP layer."""
        if not computed:
            return
        spans, rows = [], []
        for part in computed:
            request, start = part.request, part.start
            next_ids = request.token_ids[start + 1 : start + 1 + part.num_rows]
            assert len(next_ids) == part.num_rows, f"{request.key} has no token after its last"
            spans.append(Span(request, start, next_ids, 1))
            rows.append(torch.arange(part.first_row, part.first_row + part.num_rows))
        states = self._run(spans, hidden.index_select(0, torch.cat(rows)), on_layer)
        for span in spans:
            span.request.draft_token_ids = []
        requests = [span.request for span in spans]
        going = [i for i, request in enumerate(requests) if self._can_draft(request)]
        while going:
            requests, states = [requests[i] for i in going], states[torch.tensor(going)]
            chosen = self._model.logits(states).argmax(dim=-1).tolist()
            for request, token_id in zip(requests, chosen, strict=True):
                request.draft_token_ids.append(token_id)
            going = [i for i, request in enumerate(requests) if self._can_draft(request)]
            if going:
                requests, states = [requests[i] for i in going], states[torch.tensor(going)]
                spans = [Span(r, _last_position(r), r.draft_token_ids[-1:], 1) for r in requests]
                states, going = self._run(spans, states, None), list(range(len(spans)))

    def _run(self, spans: Sequence[Span], hidden: Tensor, on_layer: OnLayer | None) -> Tensor:
        """-> the states of the last token of each span."""
        batch = self._batches.build_spans(spans)
        states = self._model.draft(batch.input_ids, batch.positions, hidden, batch.kv, on_layer)
        return states.index_select(0, batch.sample_rows)

    def _can_draft(self, request: Request) -> bool:
        """Whether the request can use one more, and its blocks have room to go on from here."""
        num_drafts = len(request.draft_token_ids)
        if request.num_tokens - request.num_computed_tokens != 1 or request.finish_reason:
            return False
        has_slot = not num_drafts or _last_position(request) < (
            len(request.block_ids) * self._block_size
        )
        return has_slot and num_drafts < self._scheduler.num_drafts_allowed(request)


def _last_position(request: Request) -> int:
    """Where the state is, and the KV goes, that the next draft is made from."""
    return request.num_tokens - 2 + len(request.draft_token_ids)
