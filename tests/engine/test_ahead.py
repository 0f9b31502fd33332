"""Steps launched ahead give the tokens of steps one by one, whatever ends or leaves meanwhile."""

from collections.abc import Sequence
from typing import Any

import pytest

from decoder.graph import graph_forward
from engine.colocated import ColocatedEngine
from engine.models import CausalLM
from engine.parallel_config import ParallelConfig
from engine.request import FinishReason, Request, SamplingParams
from engine.scheduler import SchedulerConfig
from engine.worker.assembly import why_in_turn
from engine.worker.config import WorkerConfig
from kernels.ops import select_ops
from kernels.reference import ReferenceOps
from tests.engine.steps import random_token_ids
from tests.engine.tiny import from_hf
from tests.engine.tiny_families import FAMILIES

OPS = select_ops("auto")
PREFIX = random_token_ids(24, seed=0)
Ways = Sequence[dict[str, Any]]
WAYS: Ways = (
    {},
    {"temperature": 0.9, "top_k": 7},
    {"temperature": 1.2, "top_p": 0.8, "min_tokens": 9},
    {"temperature": 0.7, "min_p": 0.05, "logit_bias": {5: 2.0}},
    {"num_logprobs": 2},
    {"temperature": 1.0},
)
TWO_RANKS = ParallelConfig(tp_size=2)
HELD_UP: Ways = (
    {"repetition_penalty": 1.3, "temperature": 0.8},
    {"frequency_penalty": 0.5},
    {"num_prompt_logprobs": 1},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return from_hf(FAMILIES["qwen3"](), tmp_path_factory.mktemp("model"), OPS)


def requests(ways: Ways) -> list[Request]:
    made = []
    for i, way in enumerate(ways):
        prompt = PREFIX + random_token_ids(3 + 4 * i, seed=i)
        sampling = SamplingParams(**{"seed": i, "max_tokens": 20 + i, "ignore_eos": True} | way)
        made.append(Request(f"{i}", 0, prompt, len(prompt), sampling))
    return made


def worker_config(**options: Any) -> WorkerConfig:
    return WorkerConfig(engine_id="decoder-0", model_path="", model_name="", **options)


def make_engine(model: CausalLM, *, is_async: bool, num_blocks: int = 60) -> ColocatedEngine:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=120)
    return ColocatedEngine(
        model,
        OPS,
        num_blocks=num_blocks,
        block_size=8,
        scheduler_config=config,
        make_forward=graph_forward(worker_config(), lambda phase, progress: None),
        async_scheduling=is_async,
    )


def one_by_one(model: CausalLM, ways: Ways) -> list[list[int]]:
    made = requests(ways)
    make_engine(model, is_async=False).generate(made)
    return [request.token_ids for request in made]


def with_stops(ways: Ways, tokens: Sequence[Sequence[int]]) -> Ways:
    """Ways that end in the middle, by a token that nobody knows ahead."""
    stops = [frozenset({ids[-8]}) for ids in tokens]
    return [way | {"stop_token_ids": stop} for way, stop in zip(ways, stops, strict=True)]


@pytest.mark.parametrize("num_blocks", [60, 16])
@pytest.mark.parametrize("ways", [WAYS, WAYS + HELD_UP])
def test_tokens_are_those_of_steps_one_by_one(model: CausalLM, ways: Ways, num_blocks: int) -> None:
    expected = one_by_one(model, ways)
    stopping = with_stops(ways, expected)
    engine = make_engine(model, is_async=True, num_blocks=num_blocks)
    assert engine.ahead is not None
    for chosen, wanted in ((ways, expected), (stopping, one_by_one(model, stopping))):
        made = requests(chosen)
        engine.generate(made)
        assert [request.token_ids for request in made] == wanted
        ended = {request.finish_reason for request in made}
        assert (FinishReason.STOP in ended) == (chosen is stopping)
    engine.close()
    stats = engine.ahead.stats
    assert stats.num_ahead > 20
    assert stats.num_discarded > 0
    assert (stats.waits["penalties"] > 0) == (ways != WAYS)
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 16)
    engine.block_manager.check_integrity([])
    assert engine.block_manager.num_held_blocks == 0


def test_a_request_that_leaves_while_its_step_runs_holds_nobody_up(model: CausalLM) -> None:
    expected = one_by_one(model, WAYS)
    engine = make_engine(model, is_async=True, num_blocks=24)
    made = requests(WAYS)
    for request in made:
        engine.scheduler.add(request)
    while made[1].num_output_tokens < 5:
        engine.step()
    assert made[1].num_running_tokens == 1
    engine.scheduler.remove(made[1])
    assert made[1].block_ids == []
    assert engine.block_manager.num_quarantined_blocks > 0, "a step may still write there"
    engine.generate([])
    engine.close()
    assert made[1].num_output_tokens == 5
    assert [r.token_ids for r in (made[0], *made[2:])] == [expected[0], *expected[2:]]
    assert engine.block_manager.num_held_blocks == 0


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_npu"),
    [
        ({}, "async_scheduling is auto, on a CPU", ""),
        ({"async_scheduling": "on"}, "", ""),
        ({"async_scheduling": "off"}, *2 * ("async_scheduling is off",)),
        ({"async_scheduling": "on", "speculation": "ngram"}, *2 * ("speculation",)),
        ({"async_scheduling": "on", "parallel": TWO_RANKS}, *2 * ("several ranks",)),
    ],
)
def test_steps_run_ahead_where_they_may(options: dict[str, Any], on_cpu: str, on_npu: str) -> None:
    config = worker_config(**options)
    beside = ReferenceOps()
    beside.runs_ahead = True
    assert why_in_turn(config, ReferenceOps()) == on_cpu
    assert why_in_turn(config, beside) == on_npu
