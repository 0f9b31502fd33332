"""The model as the leader's runner calls it: every call is carried out by all ranks together."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from engine.batch import Batch, KVBatch
from engine.config import ModelConfig
from engine.context_parallel import rows_by_rank
from engine.dual_batch import largest_half, plan_halves
from engine.layers.attention import OnLayer
from engine.models.decoder import DecoderForCausalLM
from engine.parallel import Parallel
from engine.parallel_config import ParallelConfig
from engine.rank_adapters import AdapterWeights, LowRank, RankAdapters
from engine.runner import ForwardStats, GraphForward
from engine.step_plan import plan_step
from engine.worker.ranks import Ranks
from kernels.kv_cache import KVCache
from protos import ranks_pb2


class LeadingModel:
    """Implements engine.models.CausalLM; used by the engine's loop thread alone.

    Calls are for an engine with one data-parallel rank; see lockstep for several.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        parallel: Parallel,
        ranks: Ranks,
        adapters: RankAdapters | None = None,
    ) -> None:
        """adapters: of the leader's part; None: it takes none."""
        self.own = model
        """The leader's part."""
        self.parallel = parallel
        self._ranks = ranks
        self._adapters = adapters
        self._pushes: dict[int, Sequence[ranks_pb2.Push]] = {}
        self._last_pushes: Sequence[ranks_pb2.Push] = ()

    @property
    def config(self) -> ModelConfig:
        """Of the whole model."""
        return self.own.config

    def push_with_next(self, dp_rank: int, pushes: Sequence[ranks_pb2.Push]) -> None:
        """Let the followers of a data-parallel rank push these blocks, layer by layer, in the next
        forward pass.
        """
        self._pushes[dp_rank] = pushes

    def start(self, forwards: Sequence[ranks_pb2.Forward], graph_sizes: Sequence[int] = ()) -> int:
        """Let the followers begin a forward pass, those of data-parallel rank i with forwards[i],
        by the graph of graph_sizes[i] if there are sizes; the leader has to join in with its own
        part. -> number of the step.
        """
        config, model_config, step = self.parallel.config, self.config, self.parallel.step
        num_rows = [len(forward.input_ids) // 4 for forward in forwards]
        if config.cp_size > 1:
            starts = ints_from_bytes(forwards[0].cu_seqlens_q)
            num_rows = rows_by_rank(starts, config.cp_size, config.cp_min_tokens)
        top_k = model_config.moe.num_experts_per_tok if model_config.moe else 0
        has_operators = self.parallel.exchange is not None
        plan = plan_step(num_rows, config, top_k, has_operators=has_operators)
        cuts: Sequence[int] = [0] * len(forwards)
        if not (forwards[0].draft_depth or graph_sizes):
            by_rank = [ints_from_bytes(forward.cu_seqlens_q) for forward in forwards]
            cuts = plan_halves(by_rank, config)
        if any(cuts):
            plan.bucket, plan.is_even = largest_half(num_rows, cuts), False
        plan.cut = cuts[0]
        step.become(plan)
        for forward, size in zip(forwards, graph_sizes, strict=False):
            forward.graph_size = size
        for forward, cut in zip(forwards, cuts, strict=True):
            forward.bucket, forward.gathers_experts, forward.cut = plan.bucket, plan.gathers, cut
            forward.even_rows = plan.is_even
        if not forwards[0].draft_depth:
            self._last_pushes = self._pushes.get(0, ())
        for dp_rank, pushes in self._pushes.items():
            forwards[dp_rank].pushes.extend(pushes)
        self._pushes.clear()
        return self._ranks.send_steps(
            [
                (followers_of(config, dp_rank), ranks_pb2.RankCommand(forward=forward))
                for dp_rank, forward in enumerate(forwards)
            ]
        )

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv: KVBatch,
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        """See CausalLM."""
        forward = forward_to_proto(input_ids, positions, kv, self.parallel.step.wanted_rows)
        if self._adapters is not None:
            for key, rows in self._adapters.rows.rows.items():
                forward.adapters.add(key=key, rows=_to_bytes(rows.int()))
        self.start([forward])
        hidden: Tensor = self.own(input_ids, positions, kv, on_layer)
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
        """See DecoderForCausalLM."""
        forward = forward_to_proto(next_ids, positions, kv)
        forward.draft_depth = depth + 1
        if on_layer is not None:
            forward.pushes.extend(self._last_pushes)
        self.start([forward])
        hidden = self.parallel.tp.broadcast(hidden.contiguous(), 0)
        return self.own.draft(next_ids, positions, hidden, kv, on_layer, depth)

    def put(self, key: str, weights: AdapterWeights) -> None:
        """Hand the followers an adapter, of which each keeps its part; see AdapterHolder."""
        put = ranks_pb2.PutAdapter(key=key)
        for name, low_rank in weights.items():
            a, b = (part.contiguous().numpy().tobytes() for part in (low_rank.a, low_rank.b))
            put.weights.add(projection=name, rank=len(low_rank.a), a=a, b=b)
        self._ranks.send(ranks_pb2.RankCommand(put_adapter=put), self._ranks.others)

    def drop(self, keys: Collection[str]) -> None:
        """Let the followers forget these."""
        drop = ranks_pb2.DropAdapters(keys=sorted(keys))
        self._ranks.send(ranks_pb2.RankCommand(drop_adapters=drop), self._ranks.others)

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM; computed by the leader's tensor-parallel group."""
        hidden = hidden.contiguous()
        logits = ranks_pb2.Logits(num_rows=len(hidden))
        helpers = range(1, self.parallel.config.tp_size)
        self._ranks.send_steps([(helpers, ranks_pb2.RankCommand(logits=logits))])
        return self.own.logits(self.parallel.tp.broadcast(hidden, 0))


class LeadingForward:
    """Implements `engine.runner.Forward`: every rank replays the same graph, or none does.

    For an engine with one data-parallel rank; see lockstep for several.
    """

    def __init__(self, model: LeadingModel, own: GraphForward) -> None:
        """own: of the leader's part of the model; all ranks have graphs of its sizes."""
        self._model = model
        self._own = own

    @property
    def stats(self) -> ForwardStats:
        """See `Forward`."""
        return self._own.stats

    def graph_size(self, batches: Sequence[Batch], on_layer: OnLayer | None = None) -> int:
        """See `Forward`."""
        return self._own.graph_size(batches, on_layer)

    def replay(self, batch: Batch, size: int) -> Tensor:
        """See `Forward`."""
        forward = forward_to_proto(batch.input_ids, batch.positions, batch.kv)
        self._model.start([forward], [size])
        return self._own.replay(batch, size)

    def __call__(self, batch: Batch, on_layer: OnLayer | None = None) -> Tensor:
        """See `Forward`."""
        if size := self.graph_size([batch], on_layer):
            return self.replay(batch, size)
        return self._model(batch.input_ids, batch.positions, batch.kv, on_layer)


def followers_of(config: ParallelConfig, dp_rank: int) -> range:
    """The ranks of a data-parallel rank, the leader apart; of all stages, if there are several."""
    if config.pp_size > 1:
        return range(1, config.world_size)
    size = config.tp_size * config.cp_size
    first = dp_rank * size
    return range(max(first, 1), first + size)


def forward_to_proto(
    input_ids: Tensor,
    positions: Tensor,
    kv: KVBatch,
    wanted_rows: Tensor | None = None,
    *,
    gathers: bool = False,
) -> ranks_pb2.Forward:
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
        wanted_rows=b"" if wanted_rows is None else _to_bytes(wanted_rows),
        gathers=gathers,
    )


def forward_from_proto(
    forward: ranks_pb2.Forward, k_caches: Sequence[KVCache], v_caches: Sequence[KVCache]
) -> tuple[Tensor, Tensor, KVBatch]:
    """(input_ids, positions, kv): inverse of `forward_to_proto`, with this rank's caches."""
    device = next((cache.device for cache in k_caches), torch.device("cpu"))
    kv = KVBatch(
        k_caches=k_caches,
        v_caches=v_caches,
        slot_mapping=ints_from_bytes(forward.slot_mapping).to(device),
        block_table=ints_from_bytes(forward.block_table)
        .view(-1, forward.block_table_width)
        .to(device),
        # NOTE: lengths stay on the host, as in engine.batch.
        cu_seqlens_q=ints_from_bytes(forward.cu_seqlens_q),
        context_lens=ints_from_bytes(forward.context_lens),
        max_seqlen_q=forward.max_seqlen_q,
        num_decode_seqs=forward.num_decode_seqs,
        num_decode_tokens=forward.num_decode_tokens,
    )
    input_ids = ints_from_bytes(forward.input_ids).to(device)
    return input_ids, ints_from_bytes(forward.positions).to(device), kv


def adapter_from_proto(put: ranks_pb2.PutAdapter) -> AdapterWeights:
    """Inverse of what `LeadingModel.put` sends."""

    def matrix(values: bytes, *shape: int) -> Tensor:
        return torch.frombuffer(bytearray(values), dtype=torch.float32).view(shape)

    return {
        part.projection: LowRank(matrix(part.a, part.rank, -1), matrix(part.b, -1, part.rank))
        for part in put.weights
    }


def ints_from_bytes(values: bytes) -> Tensor:
    """[N] int32 of a field of Forward."""
    if not values:
        return torch.empty(0, dtype=torch.int32)
    return torch.frombuffer(bytearray(values), dtype=torch.int32)


def _to_bytes(values: Tensor) -> bytes:
    return values.cpu().contiguous().numpy().tobytes()
