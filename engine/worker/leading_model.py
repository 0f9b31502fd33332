"""The model as the leader's runner calls it: every call is carried out by all ranks together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch import KVBatch
from engine.config import ModelConfig
from engine.layers.attention import OnLayer
from engine.models import CausalLM
from engine.parallel import Parallel
from engine.worker.ranks import Ranks
from protos import ranks_pb2


class LeadingModel:
    """Implements engine.models.CausalLM; used by the engine's loop thread alone."""

    def __init__(self, model: CausalLM, parallel: Parallel, ranks: Ranks) -> None:
        self._model = model
        self._parallel = parallel
        self._ranks = ranks
        self._pushes: Sequence[ranks_pb2.Push] = ()

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        return self._model.config

    def push_with_next(self, pushes: Sequence[ranks_pb2.Push]) -> None:
        """Let the followers push these blocks, layer by layer, in the next forward pass."""
        self._pushes = pushes

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVBatch,
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        """See CausalLM."""
        forward = forward_to_proto(input_ids, positions, kv)
        forward.pushes.extend(self._pushes)
        self._pushes = ()
        self._ranks.send_step(forward)
        return self._model(input_ids, positions, kv, on_layer)

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM."""
        hidden = hidden.contiguous()
        self._ranks.send(ranks_pb2.RankCommand(logits=ranks_pb2.Logits(num_rows=len(hidden))))
        return self._model.logits(self._parallel.tp.broadcast(hidden, 0))


def forward_to_proto(input_ids: Tensor, positions: Tensor, kv: KVBatch) -> ranks_pb2.Forward:
    """A batch on the wire; the caches are each rank's own."""
    return ranks_pb2.Forward(
        input_ids=_to_bytes(input_ids),
        positions=_to_bytes(positions),
        slot_mapping=_to_bytes(kv.slot_mapping),
        block_table=_to_bytes(kv.block_table),
        block_table_width=kv.block_table.shape[1],
        cu_seqlens_q=_to_bytes(kv.cu_seqlens_q),
        context_lens=_to_bytes(kv.context_lens),
        max_seqlen_q=kv.max_seqlen_q,
        num_decode_seqs=kv.num_decode_seqs,
        num_decode_tokens=kv.num_decode_tokens,
    )


def forward_from_proto(
    forward: ranks_pb2.Forward, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]
) -> tuple[Tensor, Tensor, KVBatch]:
    """(input_ids, positions, kv): inverse of `forward_to_proto`, with this rank's caches."""
    kv = KVBatch(
        k_caches=k_caches,
        v_caches=v_caches,
        slot_mapping=_from_bytes(forward.slot_mapping),
        block_table=_from_bytes(forward.block_table).view(-1, forward.block_table_width),
        cu_seqlens_q=_from_bytes(forward.cu_seqlens_q),
        context_lens=_from_bytes(forward.context_lens),
        max_seqlen_q=forward.max_seqlen_q,
        num_decode_seqs=forward.num_decode_seqs,
        num_decode_tokens=forward.num_decode_tokens,
    )
    return _from_bytes(forward.input_ids), _from_bytes(forward.positions), kv


def _to_bytes(values: Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()


def _from_bytes(values: bytes) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.int32)
