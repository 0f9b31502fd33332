"""A scheduler over a small pool, and a model whose tokens depend on all before them."""

from collections.abc import Sequence

from engine.block_manager import BlockManager
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, SchedulerConfig

EOS = 99


def make_request(
    name: str, num_prompt_tokens: int = 5, priority: int = 0, max_tokens: int = 4, **sampling
) -> Request:
    prompt = [sum(name.encode()) % 50 + i for i in range(num_prompt_tokens)]
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Request(name, 0, prompt, num_prompt_tokens, params, priority=priority)


def make_scheduler(num_blocks: int = 32, block_size: int = 4, **options) -> Scheduler:
    settings_ = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    hold_finished = options.pop("hold_finished", False)
    config = SchedulerConfig(**(settings_ | options))
    return Scheduler(
        config,
        BlockManager(num_blocks, block_size),
        eos_token_ids=frozenset({EOS}),
        hold_finished=hold_finished,
    )


def next_token(token_ids: Sequence[int]) -> int:
    """A model: the next token depends on all before it."""
    return hash(tuple(token_ids)) % 90


def step(scheduler: Scheduler) -> list[tuple[str, int]]:
    """One step with the fake model; (request, tokens) as scheduled."""
    scheduled = scheduler.schedule().scheduled
    shown = [(entry.request.request_id, entry.num_tokens) for entry in scheduled]
    tokens = [next_token(entry.request.token_ids) for entry in scheduled if entry.samples]
    scheduler.update(scheduled, tokens)
    return shown


def run_to_end(scheduler: Scheduler, max_steps: int = 2000) -> int:
    for count in range(max_steps):
        if not scheduler.has_work:
            return count
        step(scheduler)
    raise AssertionError(f"still {scheduler.num_running} running, {scheduler.num_waiting} waiting")


def expected_tokens(prompt: Sequence[int], max_tokens: int, max_model_len: int = 64) -> list[int]:
    token_ids = list(prompt)
    while len(token_ids) < min(len(prompt) + max_tokens, max_model_len):
        token_ids.append(next_token(token_ids))
    return token_ids


def arrived(scheduler: Scheduler, name: str, num_prompt_tokens: int) -> Request:
    """A request as a decoder has it once all of its prompt's KV came in, with the first token."""
    request = make_request(name, num_prompt_tokens)
    scheduler.block_manager.attach_prefix(request)
    assert scheduler.block_manager.allocate(request, num_prompt_tokens)
    request.num_computed_tokens = num_prompt_tokens
    scheduler.block_manager.register_computed(request)
    request.token_ids.append(next_token(request.token_ids))
    return request
