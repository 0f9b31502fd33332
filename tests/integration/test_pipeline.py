"""Prefillers whose layers are in stages, in the service: tokens of one process, one life."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from engine.parallel_config import ParallelConfig
from tests.integration.alone import assert_prompt_logprobs, greedy_alone
from tests.integration.service import Service, wait_until

pytestmark = pytest.mark.multiprocess

_NUM_TOKENS = 24
_PROMPTS = [[3 + (7 * i + n * i * i) % 290 for i in range(n)] for n in (31, 33, 64, 200, 700, 699)]
_LONG = [3 + (13 * i) % 290 for i in range(3000)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """Greedy tokens of one process."""
    return greedy_alone(tiny_model, _PROMPTS, _NUM_TOKENS)


def _generate(service: Service, prompt: list[int]) -> list[int]:
    return service.generate(prompt, max_tokens=_NUM_TOKENS, ignore_eos=True)


def test_a_stage_that_dies_takes_its_engine_down_and_no_request(
    tiny_model: Path, expected: list[list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    """To a plain decoder. Before it, clients leave while chunks of theirs are under way."""
    prefiller = {"parallel": ParallelConfig(pp_size=2), "max_num_batched_tokens": 32}
    with Service(tiny_model, prefiller=prefiller) as service, ThreadPoolExecutor(8) as pool:
        body = {"model": service.model_name, "prompt": _LONG, "max_tokens": 4}
        for delay_s in (0.03, 0.08, 0.15):
            with suppress(httpx.TimeoutException):
                httpx.post(f"{service.url}/v1/completions", json=body, timeout=delay_s)
        service.assert_idle()
        assert [_generate(service, prompt) for prompt in _PROMPTS] == expected
        (worker,) = service.of_role("prefiller")
        (stage,) = psutil.Process(worker.info["pid"]).children()
        fresh = [[prompt[-1], *prompt] for prompt in _PROMPTS * 2]
        outputs = [pool.submit(_generate, service, prompt) for prompt in fresh]
        wait_until(lambda: worker.stats().num_running, 20, "the prefiller runs")
        os.kill(stage.pid, signal.SIGKILL)
        wait_until(lambda: not worker.alive, 10, "the engine ends with its stage")
        service.publish()
        assert all(len(output.result(60)) == _NUM_TOKENS for output in outputs)
        assert f"engine {worker.engine_id} is broken: rank 1 is gone" in capfd.readouterr().err
        service.restart(worker)
        assert _generate(service, _PROMPTS[4]) == expected[4]
        service.assert_idle()


async def test_stages_of_two_ranks_write_every_layer_of_a_decoder_of_two(
    tiny_model: Path, expected: list[list[int]]
) -> None:
    with Service(
        tiny_model,
        prefiller={
            "parallel": ParallelConfig(pp_size=2, tp_size=2),
            "max_num_batched_tokens": 96,
        },
        decoder={"parallel": ParallelConfig(tp_size=2)},
        proxy={"local_prefill_tokens": 8},
    ) as service:
        assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected
        assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected, (
            "a warm prefix cache changed tokens"
        )
        (prefiller,) = service.of_role("prefiller")
        stats = prefiller.stats()
        calls = {(c.rank, c.kind): c.num_calls for c in stats.collectives}
        assert calls[0, "pp.send"] == calls[2, "pp.receive"] == stats.num_steps
        assert len(stats.rank_busy_s) == 4
        assert min(stats.rank_busy_s) > 0
        assert_prompt_logprobs(service, tiny_model, _PROMPTS[3])
        service.assert_idle()
