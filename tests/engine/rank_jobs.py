"""What ranks are told to do in tests. Apart from the tests: every rank imports it, and importing
transformers, which the tests need, takes seconds.
"""

import gc
import threading
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.adapters import Adapters
from engine.batch import BatchBuilder, KVBatch
from engine.collectives import since
from engine.config import MoEConfig, Quantization
from engine.dual_batch import cut_of
from engine.expert_balancer import BalanceStats
from engine.layer_sharding import ShardedBytes
from engine.layers.layer import named_weights, pack_weights
from engine.layers.moe import MoE
from engine.layers.rows import rows_of
from engine.models import CausalLM, build_model
from engine.parallel import Parallel
from engine.rank_adapters import RankAdapters
from engine.request import Request
from engine.scheduler_output import ScheduledRequest
from engine.weights import load_model_config, load_weights
from kernels.kv_cache import tensors_of
from kernels.ops import select_ops
from tests.engine.steps import (
    VOCAB_SIZE,
    PoisonedCache,
    load,
    logits_by_steps,
    logits_of_requests,
    make_request,
    random_token_ids,
)

# Lengths of prompts by data-parallel rank, uneven; two rounds, so that each rank is empty once.
ROUNDS = (((1, 17, 9), (33,)), ((), (2, 5)), ((7,), ()))
NUM_GREEDY = (4, 6, 2)
HIDDEN, WIDTH, EXPERTS, TOP_K = 24, 16, 16, 3


def collectives(parallel: Parallel, folder: Path) -> dict[str, tuple[int, int]]:
    """Of everything."""
    greedy(parallel, folder, dp_rank=0)
    return parallel.counters.snapshot()


def greedy(
    parallel: Parallel, folder: Path, dp_rank: int | None = None
) -> tuple[list[Tensor], list[list[int]]]:
    """Of the prompts of this data-parallel rank, or of that one, in chunks, and then of a few
    tokens each: the logits at every token, and the tokens, of the kernels that serve here. Ranks
    without work run dummy rows.
    """
    model = _in_halves(load(folder, select_ops("auto"), parallel), parallel)
    parallel.step.gathers = parallel.config.moe_exchange == "gather"
    mine = parallel.config.dp_rank if dp_rank is None else dp_rank
    logits: list[Tensor] = []
    token_ids: list[list[int]] = []
    for number, lengths in enumerate(ROUNDS):
        cache = PoisonedCache(model, num_blocks=40, block_size=4, parallel=parallel)
        prompts = [[t % 95 for t in random_token_ids(n, seed=n + number)] for n in lengths[mine]]
        requests = [make_request(prompt) for prompt in prompts]
        take = lambda i, left: (i + 1, 5, 1)[left % 3]  # noqa: E731
        for step in range(max(NUM_GREEDY)):
            going = [r for r, n in zip(requests, NUM_GREEDY, strict=False) if step < n]
            for request in going:
                cache.allocate(request)
            rows = logits_of_requests(model, cache, going, take, lockstep=parallel.world)
            for request, of_request in zip(going, rows, strict=True):
                request.token_ids.append(int(of_request[-1].argmax()))
            logits += rows
        token_ids += [request.token_ids for request in requests]
    return logits, token_ids


def context_states(
    parallel: Parallel, folder: Path, cache_dtype: str, wanted: Sequence[int] | None
) -> tuple[list[Tensor], list[Tensor], dict[str, tuple[int, int]]]:
    """Of five prompts in steps of up to 50 tokens each, on the C++ kernels: states [T, H] of every
    step; what all of it left in the caches, by part and layer; what was sent.
    """
    model = load(folder, select_ops("cpu"), parallel)
    cache = PoisonedCache(model, 90, 4, parallel=parallel, dtype=cache_dtype)
    requests = [make_request(_prompt(n)) for n in (1, 90, 3, 50, 131)]
    for request in requests:
        cache.allocate(request)
    builder = BatchBuilder(cache.k_caches, cache.v_caches, cache.block_size)
    if wanted is not None:
        parallel.step.wanted_rows = torch.tensor(wanted, dtype=torch.int32)
    before, states = parallel.counters.snapshot(), []
    while left := [r for r in requests if r.num_computed_tokens < r.num_tokens]:
        chosen = [ScheduledRequest(r, min(50, r.num_tokens - r.num_computed_tokens)) for r in left]
        batch = builder.build(chosen)
        with torch.inference_mode():
            states.append(model(batch.input_ids, batch.positions, batch.kv).clone())
        for entry in chosen:
            entry.request.num_computed_tokens += entry.num_tokens
    parts = [t for c in (*cache.k_caches, *cache.v_caches) for t in tensors_of(c) if t is not None]
    blocks = [b for request in requests for b in request.block_ids]
    return states, [t[blocks] for t in parts], since(parallel.counters.snapshot(), before)


def _prompt(num_tokens: int) -> list[int]:
    return [t % 95 for t in random_token_ids(num_tokens, seed=num_tokens)]


def _in_halves(model: CausalLM, parallel: Parallel) -> CausalLM:
    """Every step of it, if the configuration says so."""

    def divide(model: CausalLM, inputs: tuple[Tensor, Tensor, KVBatch, object]) -> None:
        parallel.step.cut = cut_of(inputs[2].cu_seqlens_q)

    if parallel.config.dual_batch_overlap:
        model.register_forward_pre_hook(divide)
    return model


def pushed_layers(parallel: Parallel, folder: Path) -> tuple[list[int], list[str], bool]:
    """Layers as they are said to be written, of a step in halves; the threads that computed o_proj,
    in order; whether all the step's keys were there by then.
    """
    model = _in_halves(load(folder, select_ops("reference"), parallel), parallel)
    builder, requests = _prompts(model, parallel)
    batch = builder.build([ScheduledRequest(r, r.num_tokens) for r in requests])
    pushed: list[int] = []
    threads: list[str] = []
    found = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(
            lambda *_: threads.append(threading.current_thread().name)
        )

    def on_layer(layer_idx: int) -> None:
        cache = batch.kv.k_caches[layer_idx].transpose(1, 2)  # [blocks, block_size, heads, D]
        found.append(cache.flatten(0, 1)[batch.kv.slot_mapping.long()].isfinite().all())
        pushed.append(layer_idx)

    with torch.inference_mode():
        model(batch.input_ids, batch.positions, batch.kv, on_layer)
    return pushed, threads, all(found)


def sharded_greedy(parallel: Parallel, folder: Path) -> tuple[list[Tensor], list[list[int]], int]:
    """As `greedy`, and how many weights went from rank to rank."""
    logits, token_ids = greedy(parallel, folder)
    counts = parallel.counters.snapshot()
    return logits, token_ids, sum(n for kind, (n, _) in counts.items() if "broadcast" in kind)


def shared_threads(parallel: Parallel, folder: Path) -> set[str]:
    """The threads on which shared experts compute, of one forward pass."""
    model = load(folder, select_ops("reference"), parallel)
    names: set[str] = set()
    for moe in model.modules():
        if isinstance(moe, MoE) and moe.shared_experts is not None:
            moe.shared_experts.down_proj.register_forward_hook(
                lambda *_: names.add(threading.current_thread().name)
            )
    cache = PoisonedCache(model, num_blocks=24, block_size=4, parallel=parallel)
    logits_by_steps(model, cache, [random_token_ids(6, seed=0)], lambda _, left: left)
    return names


def part_logits(
    parallel: Parallel, path: Path, quantization: Quantization = "none"
) -> list[Tensor]:
    """Uneven chunks of prompts beside single tokens, to the end of every sequence."""
    model = load(path, select_ops("reference"), parallel, quantization)
    cache = PoisonedCache(model, num_blocks=24, block_size=4, parallel=parallel)
    sequences = [_prompt(n) for n in (1, 7, 33)]
    return logits_by_steps(model, cache, sequences, lambda i, left: (i + 1, 5, 1)[left % 3])


def adapter_logits(parallel: Parallel, folder: Path, adapter: Path) -> Tensor:
    """[T, V] of a batch of three sequences, the second with the adapter."""
    model = load(folder, select_ops("reference"), parallel)
    own = RankAdapters(model)
    adapters = Adapters(own)
    adapters.load("mine", adapter)
    builder, requests = _prompts(model, parallel)
    requests[1].adapter = adapters.key("mine")
    scheduled = [ScheduledRequest(request, request.num_tokens) for request in requests]
    batch = builder.build(scheduled)
    with torch.inference_mode(), own.rows.set(adapters.rows_of(scheduled)):
        return model.logits(model(batch.input_ids, batch.positions, batch.kv))


def draft_states(parallel: Parallel, folder: Path) -> list[Tensor]:
    """[T, hidden_size] of every MTP layer, for three prompts."""
    config = load_model_config(folder)
    config = replace(config, num_draft_layers=config.num_mtp_layers)
    model = build_model(config, select_ops("reference"), parallel)
    load_weights(folder, model)
    builder, requests = _prompts(model, parallel)
    batch = builder.build([ScheduledRequest(r, r.num_tokens) for r in requests])
    with torch.inference_mode():
        states = [model(batch.input_ids, batch.positions, batch.kv)]
        for depth in range(config.num_draft_layers):
            next_ids = batch.input_ids.roll(-1 - depth)
            states.append(model.draft(next_ids, batch.positions, states[-1], batch.kv, None, depth))
    return states


def _prompts(model: CausalLM, parallel: Parallel) -> tuple[BatchBuilder, list[Request]]:
    """Three of uneven lengths, in a cache."""
    cache = PoisonedCache(model, num_blocks=24, block_size=4, parallel=parallel)
    requests = [make_request(_prompt(n)) for n in (3, 17, 9)]
    for request in requests:
        cache.allocate(request)
    return BatchBuilder(cache.k_caches, cache.v_caches, cache.block_size), requests


def moe_step(parallel: Parallel, x: Tensor) -> tuple[Tensor, dict[str, tuple[int, int]]]:
    """One sparse layer on rows that are as they are between blocks; what it returns and calls."""
    config = MoEConfig(
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        intermediate_size=WIDTH,
        norm_topk_prob=True,
        layers=frozenset({0}),
    )
    moe = MoE(HIDDEN, config, ops=select_ops("reference"), parallel=parallel)
    for name, weight in named_weights(moe).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    pack_weights(moe)
    if rows_of(parallel).is_scattered:
        x = x.chunk(parallel.tp.size)[parallel.tp.rank]
    before = parallel.counters.snapshot()
    with torch.inference_mode():
        out = moe(x)
    return out, since(parallel.counters.snapshot(), before)


def routes(parallel: Parallel, x: Tensor) -> Tensor:
    """[T, k]: the experts of every row."""
    generator = torch.Generator().manual_seed(zlib.crc32(b"gate.weight"))
    gate = 0.3 * torch.randn(EXPERTS, HIDDEN, generator=generator)
    return (x @ gate.T).topk(TOP_K).indices


def forward_counts(parallel: Parallel, folder: Path) -> dict[str, tuple[int, int]]:
    """Of one forward pass of 6 rows, a multiple of tp_size 2, and its logits."""
    model = load(folder, select_ops("reference"), parallel)
    cache = PoisonedCache(model, num_blocks=24, block_size=4, parallel=parallel)
    before = parallel.counters.snapshot()
    logits_by_steps(model, cache, [random_token_ids(6, seed=0)], lambda _, left: left)
    return since(parallel.counters.snapshot(), before)


def balanced_logits(
    parallel: Parallel, folder: Path, quantization: Quantization = "none"
) -> tuple[list[Tensor], Tensor, BalanceStats]:
    """Logits of sequences whose tokens are far from evenly distributed, one a step; rows
    [steps, sparse layers] that this rank's experts computed in each step; what was moved.
    """
    model = _in_halves(load(folder, select_ops("cpu"), parallel, quantization), parallel)
    cache = PoisonedCache(model, num_blocks=400, block_size=4, parallel=parallel)
    generator = torch.Generator().manual_seed(parallel.config.dp_rank)
    popularity = 1.0 / torch.arange(1, VOCAB_SIZE - 3)
    tokens = 3 + torch.multinomial(popularity, 1536, replacement=True, generator=generator)
    counters = [RowCounter(moe) for moe in model.modules() if isinstance(moe, MoE)]
    rows: list[Tensor] = []
    totals = [[0] * len(counters)]
    for sequence in tokens.view(-1, 64).tolist():
        rows += logits_by_steps(model, cache, [sequence], lambda _, left: left)
        totals.append([counter.num_rows for counter in counters])
    return rows, torch.tensor(totals).diff(dim=0), model.balance_stats


class RowCounter:
    """Counts the rows that this rank's experts of one layer compute."""

    def __init__(self, moe: MoE) -> None:
        self.num_rows = 0
        self._compute = moe.experts.gated
        moe.experts._gated = self._count

    def _count(self, rows: Tensor, group_sizes: Tensor) -> Tensor:
        self.num_rows += len(rows)
        return self._compute(rows, group_sizes)


def resident_bytes(parallel: Parallel, folder: Path) -> tuple[int, ShardedBytes, list[Tensor]]:
    """Of all tensors that a model of this rank adds to the process, after some steps; what the
    model says of them; logits.
    """
    gc.collect()
    before = _tensor_bytes()
    model = load(folder, select_ops("cpu"), parallel)
    cache = PoisonedCache(model, num_blocks=24, block_size=4, parallel=parallel)
    caches = sum(c.numel() * c.element_size() for c in (*cache.k_caches, *cache.v_caches))
    sequences = [random_token_ids(n, seed=n + parallel.config.dp_rank) for n in (3, 9)]
    logits = logits_by_steps(model, cache, sequences, lambda i, left: 3 - i)
    sharded = model.sharded_bytes()
    gc.collect()
    added = _tensor_bytes() - before - caches
    return added - sum(rows.untyped_storage().nbytes() for rows in logits), sharded, logits


def _tensor_bytes() -> int:
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
