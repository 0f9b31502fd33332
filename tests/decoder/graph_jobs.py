"""What ranks with graphs are told to do; apart from the tests, see tests.engine.rank_jobs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from decoder.graph import GraphRunner
from decoder.native_graph import NativeBackend
from engine.batch import Batch, KVBatch
from engine.models import CausalLM
from engine.parallel import Parallel
from engine.runner import ForwardMemory
from kernels.graph import CaptureError
from kernels.ops import select_ops
from tests.engine.steps import (
    PoisonedCache,
    load,
    logits_of_requests,
    make_request,
    random_token_ids,
)

LENGTHS = (9, 1, 14)
NUM_TOKENS = (5, 8, 2)


class Failing(NativeBackend):
    """Cannot capture two decodes; all else it can."""

    def capture(
        self,
        forward: Callable[[Tensor, Tensor, KVBatch], Tensor],
        batch: Batch,
        agree: Callable[[], None],
    ) -> Callable[[], Tensor]:
        if len(batch.input_ids) == 2:
            raise CaptureError("out of memory")
        return super().capture(forward, batch, agree)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Of one rank."""

    tokens: list[list[int]]
    num_replays: int
    eager: set[str]
    calls: dict[str, int]
    """Collectives by kind."""


class _Through:
    """A model whose passes go through a GraphRunner."""

    def __init__(self, model: CausalLM, graphs: GraphRunner) -> None:
        self.config, self.logits, self._graphs = model.config, model.logits, graphs

    def __call__(self, input_ids: Tensor, positions: Tensor, kv: KVBatch) -> Tensor:
        return self._graphs(Batch(input_ids, positions, kv, sample_rows=input_ids[:0]))


def decode(parallel: Parallel, folder: Path, failing: Sequence[int] = ()) -> Decoded:
    """Three sequences, greedily, by graphs; ranks in `failing` cannot capture all of them."""
    ops = select_ops("cpu")
    model = load(folder, ops, parallel)
    cache = PoisonedCache(model, num_blocks=12, block_size=8, parallel=parallel)
    multiple_of = 2 if parallel.config.sequence_parallel else 1
    make = Failing if parallel.config.rank in failing else NativeBackend
    backend = make(parallel.tape, multiple_of=multiple_of)
    memory = ForwardMemory(cache.k_caches, cache.v_caches, 3, 8, parallel)
    graphs = GraphRunner(model, memory, backend)
    graphs.capture(lambda phase, progress: None)
    through: CausalLM = _Through(model, graphs)  # type: ignore[assignment]
    requests = [make_request(random_token_ids(length, seed=length)) for length in LENGTHS]
    for step in range(max(NUM_TOKENS)):
        going = [r for r, n in zip(requests, NUM_TOKENS, strict=True) if step < n]
        for request in going:
            cache.allocate(request)
        for request, logits in zip(
            going, logits_of_requests(through, cache, going, lambda _, left: left), strict=True
        ):
            assert not torch.isnan(logits).any()
            request.token_ids.append(int(logits[-1].argmax()))
    calls = {kind: calls for kind, (calls, _) in parallel.counters.snapshot().items()}
    stats = graphs.stats
    return Decoded([r.token_ids for r in requests], stats.num_replays, set(stats.eager), calls)
