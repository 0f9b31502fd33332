"""Engines of several ranks in the service: the tokens of one process, one life for all ranks."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from engine.parallel_config import ParallelConfig
from tests.integration.alone import greedy_alone
from tests.integration.service import Service, Worker, wait_until

pytestmark = pytest.mark.multiprocess

_NUM_TOKENS = 24
_PROMPTS = [[3 + (7 * i + n * i * i) % 290 for i in range(n)] for n in (1, 5, 31, 33, 64, 200, 700)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """Greedy tokens of one process."""
    return greedy_alone(tiny_model, _PROMPTS, _NUM_TOKENS)


def _generate(service: Service, prompt: list[int]) -> list[int]:
    return service.generate(prompt, max_tokens=_NUM_TOKENS, ignore_eos=True)


def _tp(size: int) -> dict[str, ParallelConfig]:
    return {"parallel": ParallelConfig(tp_size=size)}


@pytest.mark.parametrize(
    ("prefiller_tp", "decoder_tp"),
    # A prefiller of two ranks is in test_data_parallel.
    [
        (1, 2),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(4, 2, marks=pytest.mark.slow),
    ],
)
async def test_tokens_are_those_of_one_process(
    prefiller_tp: int, decoder_tp: int, tiny_model: Path, expected: list[list[int]]
) -> None:
    with Service(
        tiny_model,
        prefiller=_tp(prefiller_tp),
        decoder=_tp(decoder_tp),
        proxy={"local_prefill_tokens": 8},
    ) as service:
        assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected
        assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected, (
            "a warm prefix cache changed tokens"
        )
        (decoder,) = service.of_role("decoder")
        stats = decoder.stats()
        assert stats.num_graph_replays > _NUM_TOKENS
        assert set(stats.eager_steps) <= {"prompt tokens in the batch"}
        (prefiller,) = service.of_role("prefiller")
        assert sum(t.num_transfers for t in prefiller.stats().transfers) >= 5
        service.assert_idle()


def _followers(worker: Worker) -> list[psutil.Process]:
    return psutil.Process(worker.info["pid"]).children()


def _is_over(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE  # whoever adopted it may not reap it
    except psutil.NoSuchProcess:
        return True


def test_ranks_live_and_die_together_and_requests_go_on_elsewhere(
    tiny_model: Path, expected: list[list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    """Data-parallel ranks: the requests of both have to move."""
    spread = {"parallel": ParallelConfig(dp_size=2)}
    with Service(tiny_model, decoders=2, decoder=spread) as service, ThreadPoolExecutor(8) as pool:
        outputs = [
            pool.submit(service.generate, prompt, max_tokens=400, ignore_eos=True)
            for prompt in _PROMPTS * 2
        ]
        victim = wait_until(
            lambda: next((w for w in service.of_role("decoder") if w.stats().num_running), None),
            20,
            "a decoder runs",
        )
        (follower,) = _followers(victim)
        os.kill(follower.pid, signal.SIGKILL)
        wait_until(lambda: not victim.alive, 5, "the engine ends with its rank")
        assert f"engine {victim.engine_id} is broken: rank 1 is gone" in capfd.readouterr().err
        service.publish()
        for output, tokens in zip(outputs, expected * 2, strict=True):
            assert output.result(120)[:_NUM_TOKENS] == tokens
        (other,) = (w for w in service.of_role("decoder") if w.engine_id != victim.engine_id)
        assert other.stats().num_graph_replays > 400
        restarted = service.restart(victim)
        assert _generate(service, _PROMPTS[3]) == expected[3]
        # And the other way round: ranks end with their leader.
        (follower,) = _followers(restarted)
        restarted.kill()
        wait_until(lambda: _is_over(follower), 5, "the follower ends with its leader")
        service.publish()
