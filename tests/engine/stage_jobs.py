"""What ranks of a pipeline are told to do in tests; see rank_jobs."""

from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import BatchBuilder
from engine.models import CausalLM
from engine.parallel import Parallel
from engine.scheduler_output import ScheduledRequest
from engine.stage_link import Arriving
from engine.stages import stage_of
from kernels.ops import select_ops
from tests.engine.steps import PoisonedCache, load, make_request, random_token_ids

LENGTHS = (1, 17, 33, 9)
CHUNKS = (6, 1, 11)


def prompt_logits(parallel: Parallel, folder: Path) -> list[Tensor]:
    """[T, V] of each of some prompts, in uneven chunks of two prompts at a time, in the first
    stage; as many chunks as may be are under way at once.
    """
    model = load(folder, select_ops("reference"), parallel)
    with torch.inference_mode():
        logits = _prompt_logits(parallel, model)
    # NOTE: whoever leaves takes what it has sent with it.
    parallel.world.all_reduce(torch.zeros(1))
    return logits


def _prompt_logits(parallel: Parallel, model: CausalLM) -> list[Tensor]:
    config, link = parallel.config, parallel.link
    stage = stage_of(model.config.num_layers, config)
    cache = PoisonedCache(model, num_blocks=40, block_size=4, parallel=parallel)
    builder = BatchBuilder(cache.k_caches, cache.v_caches, cache.block_size)
    requests = [make_request([t % 95 for t in random_token_ids(n, seed=n)]) for n in LENGTHS]
    rows: list[list[Tensor]] = [[] for _ in requests]
    under_way: deque[tuple[list[tuple[int, int]], Tensor | Arriving]] = deque()

    def conclude() -> None:
        step, states = under_way.popleft()
        logits = model.logits(states.wait() if isinstance(states, Arriving) else states)
        for (i, _), part in zip(step, logits.split([n for _, n in step]), strict=True):
            rows[i].append(part)

    for request in requests:
        cache.allocate(request)
    for step in _steps():
        batch = builder.build([ScheduledRequest(requests[i], n) for i, n in step])
        hidden = model(batch.input_ids, batch.positions, batch.kv)
        for i, n in step:
            requests[i].num_computed_tokens += n
        if link is not None and stage.is_last:
            link.send_back(hidden)
        elif stage.is_first:
            num_rows = len(batch.input_ids)
            under_way.append((step, hidden if link is None else link.expect(num_rows, hidden)))
        if len(under_way) == config.max_steps_under_way:
            conclude()
    while under_way:
        conclude()
    return [torch.cat(parts) for parts in rows] if stage.is_first else []


def _steps() -> list[list[tuple[int, int]]]:
    """(prompt, tokens) of each."""
    left, steps = list(LENGTHS), []
    while any(left):
        chosen = [i for i, n in enumerate(left) if n][:2]
        step = [(i, min(left[i], CHUNKS[(len(steps) + i) % len(CHUNKS)])) for i in chosen]
        for i, n in step:
            left[i] -= n
        steps.append(step)
    return steps


def sent(parallel: Parallel, folder: Path) -> dict[str, tuple[int, int]]:
    """Calls and bytes of the same between stages."""
    prompt_logits(parallel, folder)
    counts = parallel.counters.snapshot()
    return {kind: count for kind, count in counts.items() if kind.startswith("pp")}
