"""The packaged model's greedy tokens, however the engine computes them, are transformers'."""

from collections.abc import Sequence
from itertools import compress

import pytest

from engine.colocated import ColocatedEngine
from engine.models import CausalLM
from engine.request import Request, SamplingParams
from engine.scheduler import SchedulerConfig
from kernels.ops import Ops, select_ops
from tests.engine.tiny import load
from tests.oracle import assert_hf_greedy, encode, hf_greedy, packaged_model_path, story

BLOCK_SIZE = 32
NUM_OUTPUT_TOKENS = 64
NUM_STORIES = {31: 4, 32: 4, 33: 3, 500: 3, 3000: 2}
PROMPTS = [encode(word) for word in ("The", "Once", "Hello", "In")] + [
    story(length, seed=100 * length + seed)
    for length, count in NUM_STORIES.items()
    for seed in range(count)
]
NUM_BLOCKS_FOR_ALL = 512

pytestmark = pytest.mark.timeout(900)  # two minutes in all on two quiet cores


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops("auto")


@pytest.fixture(scope="module")
def model(ops: Ops) -> CausalLM:
    return load(packaged_model_path(), ops)


def build_engine(
    model: CausalLM, ops: Ops, *, num_blocks: int, max_num_batched_tokens: int
) -> ColocatedEngine:
    return ColocatedEngine(
        model,
        ops,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        scheduler_config=SchedulerConfig(
            max_num_seqs=32, max_num_batched_tokens=max_num_batched_tokens
        ),
    )


def make_requests(prompts: Sequence[Sequence[int]]) -> list[Request]:
    sampling = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    return [
        Request(
            request_id=f"request-{i}",
            attempt=0,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
        )
        for i, prompt in enumerate(prompts)
    ]


def outputs(requests: Sequence[Request]) -> list[list[int]]:
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


@pytest.fixture(scope="module")
def big_engine(model: CausalLM, ops: Ops) -> ColocatedEngine:
    return build_engine(model, ops, num_blocks=NUM_BLOCKS_FOR_ALL, max_num_batched_tokens=2048)


@pytest.fixture(scope="module")
def cold_batched(big_engine: ColocatedEngine) -> list[list[int]]:
    """All prompts at once, in chunks of up to 2,048 tokens, on an empty cache."""
    requests = make_requests(PROMPTS)
    big_engine.generate(requests)
    assert [request.num_cached_tokens for request in requests] == [0] * len(PROMPTS)
    return outputs(requests)


def test_the_prompts_are_varied() -> None:
    assert len({tuple(prompt) for prompt in PROMPTS}) == len(PROMPTS) >= 20
    assert {len(prompt) for prompt in PROMPTS} == {1, 31, 32, 33, 500, 3000}


def test_batched_and_cold_tokens_are_those_of_transformers(cold_batched: list[list[int]]) -> None:
    for prompt, output in zip(PROMPTS, cold_batched, strict=True):
        assert len(output) == NUM_OUTPUT_TOKENS
        assert_hf_greedy(prompt, output)


def test_the_oracles_one_pass_and_its_decoding_agree(cold_batched: list[list[int]]) -> None:
    for index in (0, 8):
        assert hf_greedy(PROMPTS[index], 16) == cold_batched[index][:16]


def test_prefix_cached_prompts_give_the_same_tokens(
    big_engine: ColocatedEngine, cold_batched: list[list[int]]
) -> None:
    requests = make_requests(PROMPTS)
    big_engine.generate(requests)
    for request in requests:
        expected = (request.num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert request.num_cached_tokens == expected
    assert outputs(requests) == cold_batched


def test_chunks_of_64_in_a_pool_that_forces_preemption_give_the_same_tokens(
    model: CausalLM, ops: Ops, cold_batched: list[list[int]]
) -> None:
    engine = build_engine(model, ops, num_blocks=100, max_num_batched_tokens=64)
    # A long one first: the short ones get the last few blocks, and soon want more to grow.
    requests = make_requests(PROMPTS)
    engine.generate(requests[-1:] + requests[:-1])
    assert engine.scheduler.num_preemptions > 0
    assert outputs(requests) == cold_batched
    engine.block_manager.check_integrity(requests)
    assert engine.block_manager.num_held_blocks == 0


def test_short_prompts_in_ten_blocks_give_the_same_tokens(
    model: CausalLM, ops: Ops, cold_batched: list[list[int]]
) -> None:
    engine = build_engine(model, ops, num_blocks=10, max_num_batched_tokens=2048)
    is_short = [len(prompt) < 500 for prompt in PROMPTS]
    requests = make_requests(list(compress(PROMPTS, is_short)))
    engine.generate(requests)
    assert engine.scheduler.num_preemptions > 1
    assert outputs(requests) == list(compress(cold_batched, is_short))
    assert engine.block_manager.num_held_blocks == 0


@pytest.mark.parametrize("max_num_batched_tokens", [64, 2048])
def test_each_prompt_alone_gives_the_same_tokens(
    model: CausalLM, ops: Ops, max_num_batched_tokens: int, cold_batched: list[list[int]]
) -> None:
    engine = build_engine(
        model,
        ops,
        num_blocks=NUM_BLOCKS_FOR_ALL,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    # For time's sake a third each, of every length; in the service's tests others are alone.
    third = slice(max_num_batched_tokens == 64, None, 3)
    requests = make_requests(PROMPTS)[third]
    for request in requests:
        engine.generate([request])
        assert request.num_cached_tokens == 0
    assert outputs(requests) == cold_batched[third]
