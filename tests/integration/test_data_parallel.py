"""Data-parallel engines in the service, experts over all their ranks: the tokens of one process."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.parallel_config import EplbConfig, MoEComm, ParallelConfig
from protos import inference_pb2, inference_pb2_grpc
from tests.integration.alone import greedy_alone
from tests.integration.families import write_tiny_experts
from tests.integration.service import Service, wait_until

pytestmark = pytest.mark.multiprocess

_NUM_TOKENS = 24
_PROMPTS = [[3 + (7 * i + n * i * i) % 290 for i in range(n)] for n in (1, 5, 31, 64, 200, 500)]


@pytest.fixture(scope="module")
def experts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_experts(tmp_path_factory.mktemp("tiny-experts"), tiny_model)


def _over(**sizes: Any) -> dict[str, ParallelConfig]:
    return {"parallel": ParallelConfig(**{f"{name}_size": n for name, n in sizes.items()})}


def _in_halves(**sizes: Any) -> dict[str, ParallelConfig]:
    spread = _over(**sizes)["parallel"]
    return {"parallel": replace(spread, dual_batch_overlap=True, dual_batch_min_rows=3)}


@pytest.fixture(scope="module")
def service(experts: Path) -> Iterator[Service]:
    """Prefill by TP 2; decode by DP 2 x TP 2 with EP 4 and few blocks, so that requests are
    preempted. Steps of several rows are computed in halves.
    """
    prefiller, decoder = _in_halves(tp=2), _in_halves(dp=2, tp=2, ep=4)
    with Service(
        experts,
        worker={"block_size": 8},
        prefiller=prefiller,
        decoder={**decoder, "num_blocks": 72, "max_num_seqs": 12},
        proxy={"local_prefill_tokens": 8},
    ) as service:
        yield service


async def test_tokens_of_data_parallel_roles_that_differ_are_those_of_one_process(
    service: Service, experts: Path
) -> None:
    expected = greedy_alone(experts, _PROMPTS, _NUM_TOKENS)
    (decoder,) = service.of_role("decoder")
    # Alone: the other data-parallel rank has dummy rows, in every step.
    assert await service.generate_all(_PROMPTS[3:4], _NUM_TOKENS) == expected[3:4]
    idle = decoder.stats()
    assert [p.num_dummy_steps for p in idle.pools] == [0, idle.num_steps]
    assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected
    both = decoder.stats()
    num_exchanges = max(c.num_calls for c in both.collectives if c.kind == "ep.all_to_all")
    assert num_exchanges > 2 * 3 * both.num_steps, "no step was computed in halves"
    assert all(p.num_dummy_steps < both.num_steps for p in both.pools), "one did nothing"
    service.assert_idle()
    await asyncio.sleep(0.5)
    assert decoder.stats().num_steps == both.num_steps, "it steps with nothing to do"


async def test_prompt_logprobs_are_the_same_from_every_rank(service: Service) -> None:
    """Short prompts, which the decoder computes: of the second rank all rows come to the leader."""
    options = {"echo": True, "logprobs": 2, "max_tokens": 1, "ignore_eos": True}
    (decoder,) = service.of_role("decoder")
    before = decoder.stats()
    replies = await asyncio.gather(
        *(asyncio.to_thread(service.complete, _PROMPTS[1], **options) for _ in range(4))
    )
    after = decoder.stats()
    for old, new in zip(before.pools, after.pools, strict=True):
        num_dummy_steps = new.num_dummy_steps - old.num_dummy_steps
        assert num_dummy_steps < after.num_steps - before.num_steps, "a rank took none"
    first, *others = [reply["choices"][0]["logprobs"] for reply in replies]
    assert len(first["token_logprobs"]) == len(_PROMPTS[1]) + 1
    for other in others:
        assert other["tokens"] == first["tokens"]
        assert other["token_logprobs"][1:] == pytest.approx(first["token_logprobs"][1:], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefiller", "decoder"),
    [
        ({"dp": 2, "ep": 2}, {"tp": 2}),
        ({"dp": 2, "tp": 2, "ep": 4}, {"dp": 2}),
        ({"tp": 4, "ep": 2}, {"dp": 4, "ep": 4}),
    ],
    ids=str,
)
@pytest.mark.parametrize("moe_comm", ["zero_redundancy", "allgather"])
async def test_tokens_of_other_spreads_are_those_of_one_process(
    prefiller: dict[str, int], decoder: dict[str, int], moe_comm: MoEComm, experts: Path
) -> None:
    expected = greedy_alone(experts, _PROMPTS, _NUM_TOKENS)
    roles = [
        {"parallel": replace(_over(**sizes)["parallel"], moe_comm=moe_comm)}
        for sizes in (prefiller, decoder)
    ]
    with Service(
        experts, prefiller=roles[0], decoder=roles[1], proxy={"local_prefill_tokens": 8}
    ) as service:
        assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected
        again = await service.generate_all(_PROMPTS, _NUM_TOKENS)
        assert again == expected, "a warm prefix cache"
        service.assert_idle()


@pytest.mark.slow
async def test_tokens_are_the_same_while_experts_move_and_drafts_are_verified(
    experts: Path,
) -> None:
    expected = greedy_alone(experts, _PROMPTS, _NUM_TOKENS)
    eplb = EplbConfig(mode="dynamic", interval_steps=8, num_redundant_experts=4)
    spread = replace(_in_halves(dp=2, tp=2, ep=4)["parallel"], eplb=eplb, moe_exchange="gather")
    with Service(
        experts,
        worker={"speculation": "ngram", "num_draft_tokens": 3},
        decoder={"parallel": spread},
        proxy={"local_prefill_tokens": 8},
    ) as service:
        for _ in range(4):
            assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected
        (decoder,) = service.of_role("decoder")
        stats = decoder.stats()
        assert stats.num_moved_experts
        assert stats.num_accepted_tokens
        service.assert_idle()


def _collectives(service: Service) -> dict[str, dict[tuple[str, ...], float]]:
    """What Prometheus reads of the decoder: by name, by (kind, rank)."""
    families = {f.name: f for f in text_string_to_metric_families(service.metrics())}
    return {
        name: {
            (s.labels["kind"], s.labels["rank"]): s.value
            for s in families[f"pdserve_collective_{name}"].samples
            if s.labels["role"] == "decoder"
        }
        for name in ("calls", "bytes")
    }


def test_collectives_of_every_rank_are_metrics(service: Service) -> None:
    (decoder,) = service.of_role("decoder")

    def counted(name: str) -> dict[tuple[str, ...], float]:
        return {(c.kind, str(c.rank)): getattr(c, name) for c in decoder.stats().collectives}

    def are_shown() -> bool:
        shown = _collectives(service)
        return shown["calls"] == counted("num_calls") and shown["bytes"] == counted("num_bytes")

    def exchanges() -> set[float]:
        """Of the ranks."""
        return {n for (kind, _), n in counted("num_calls").items() if kind == "ep.all_to_all"}

    service.generate(_PROMPTS[0], max_tokens=4, ignore_eos=True)
    wait_until(lambda: len(exchanges()) == 1, 5, "every rank takes part in every step")
    (before,), steps_before = exchanges(), decoder.stats().num_steps
    service.generate(_PROMPTS[0], max_tokens=4, ignore_eos=True)
    # Two sparse layers of three exchanges; single rows are not divided.
    added = 2 * 3 * (decoder.stats().num_steps - steps_before)
    wait_until(lambda: exchanges() == {before + added}, 5, "all ranks have counted")
    wait_until(are_shown, 5, "what was counted is shown")


@dataclass(frozen=True, slots=True)
class _Call:
    """A request of the soak, and how many of its tokens are read before its client leaves."""

    prompt_index: int
    max_tokens: int
    leaves_after: int | None


def _soak_calls(rng: random.Random, lengths: list[int]) -> list[_Call]:
    if rng.random() < 0.2:  # more than the blocks hold once they have grown
        short = [i for i, length in enumerate(lengths) if length < 8]
        return [_Call(rng.choice(short), _SOAK_TOKENS, None) for _ in range(24)]
    calls = []
    for _ in range(rng.choice((1, 2, 9, 24))):
        max_tokens = rng.choice((1, 3, 20, _SOAK_TOKENS))
        leaves = rng.randrange(max_tokens) if rng.random() < 0.3 else None
        calls.append(_Call(rng.randrange(_NUM_SOAK_PROMPTS), max_tokens, leaves))
    return calls


async def _soak_call(
    stub: inference_pb2_grpc.InferenceStub, prompt: list[int], call: _Call
) -> list[int]:
    request = inference_pb2.GenerateRequest(
        model="test-model",
        token_ids=inference_pb2.TokenIds(ids=prompt),
        options=inference_pb2.GenerationOptions(
            temperature=0, ignore_eos=True, max_tokens=call.max_tokens
        ),
    )
    token_ids: list[int] = []
    stream = stub.GenerateStream(request, timeout=_SOAK_TIMEOUT_S)
    async for chunk in stream:
        token_ids += [t for choice in chunk.choices for t in choice.token_ids]
        if call.leaves_after is not None and len(token_ids) > call.leaves_after:
            stream.cancel()
            break
    return token_ids


_NUM_SOAK_PROMPTS = 24
_SOAK_TOKENS = 60
_SOAK_TIMEOUT_S = 120.0


@pytest.mark.parametrize(
    "duration_s", [8, pytest.param(600, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
async def test_no_rank_hangs_or_errs_whatever_comes_and_goes(
    service: Service, experts: Path, duration_s: float
) -> None:
    """Batches of any size on either rank, clients that leave, preemptions, pauses."""
    rng = random.Random(4)
    lengths = [rng.choice((1, 7, 40, 150, 400)) for _ in range(_NUM_SOAK_PROMPTS)]
    prompts = [[rng.randrange(3, 300) for _ in range(n)] for n in lengths]
    expected = greedy_alone(experts, prompts, _SOAK_TOKENS)
    (decoder,) = service.of_role("decoder")
    end_s = time.monotonic() + duration_s
    num_calls = 0
    async with grpc.aio.insecure_channel(service.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        while time.monotonic() < end_s:
            calls = _soak_calls(rng, lengths)
            num_calls += len(calls)
            outputs = await asyncio.gather(
                *(_soak_call(stub, prompts[call.prompt_index], call) for call in calls)
            )
            for call, token_ids in zip(calls, outputs, strict=True):
                whole = expected[call.prompt_index][: call.max_tokens]
                if call.leaves_after is None:
                    assert token_ids == whole, call
                else:
                    assert token_ids == whole[: len(token_ids)], call
            await asyncio.sleep(rng.choice((0.0, 0.05, 0.4)))
    service.assert_idle()
    stats = decoder.stats()
    print(f"soak: {num_calls} requests, {stats.num_steps} steps, {list(stats.pools)}")
    assert all(pool.num_dummy_steps for pool in stats.pools), "no rank was ever empty"
    assert stats.num_preemptions, "nothing was preempted"
    assert stats.num_expired_leases == 0


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_and_its_engine_starts_anew(
    experts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = greedy_alone(experts, _PROMPTS[:2], _NUM_TOKENS)
    spread = {**_over(dp=2, tp=2, ep=4), "rank_timeout_s": 5.0}
    with Service(experts, decoder=spread) as service:
        (decoder,) = service.of_role("decoder")
        pids = [p.pid for p in psutil.Process(decoder.info["pid"]).children()]
        os.kill(pids[2], signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            output = pool.submit(
                service.generate, _PROMPTS[0], max_tokens=_NUM_TOKENS, ignore_eos=True
            )
            wait_until(lambda: not decoder.alive, 20, "the engine ends")
            error = capfd.readouterr().err
            assert "engine decoder-0 is broken: rank 3 is late: step 1 has not ended" in error
            service.restart(decoder)
            assert output.exception(60) is not None or output.result() == expected[0]
        tokens = service.generate(_PROMPTS[1], max_tokens=_NUM_TOKENS, ignore_eos=True)
        assert tokens == expected[1]
    assert not any(psutil.pid_exists(pid) for pid in pids)
