"""Prefillers whose ranks share the rows of a prompt, in the service: the tokens of one process."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.parallel_config import ParallelConfig
from kvtransfer.tiers.config import TierConfig
from tests.integration.alone import assert_prompt_logprobs, greedy_alone
from tests.integration.families import write_tiny_experts
from tests.integration.service import Service, wait_until

pytestmark = pytest.mark.multiprocess

_NUM_TOKENS = 12
_PROMPTS = [[3 + (7 * i + n * i * i) % 290 for i in range(n)] for n in (1, 5, 33, 64, 200, 700)]


def _over(**sizes: Any) -> dict[str, ParallelConfig]:
    return {"parallel": ParallelConfig(**{f"{name}_size": n for name, n in sizes.items()})}


@pytest.fixture(scope="module")
def service(tiny_model: Path) -> Iterator[Service]:
    """CP 2 x TP 2, in chunks of 150 tokens, to a decoder of one process with other blocks."""
    with Service(
        tiny_model,
        prefiller={**_over(cp=2, tp=2), "block_size": 8, "max_num_batched_tokens": 150},
        decoder={"block_size": 16},
    ) as service:
        yield service


async def test_tokens_are_those_of_one_process(service: Service, tiny_model: Path) -> None:
    expected = greedy_alone(tiny_model, _PROMPTS, _NUM_TOKENS)
    assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected
    assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected, (
        "a warm prefix cache changed tokens"
    )
    (prefiller,), (decoder,) = service.of_role("prefiller"), service.of_role("decoder")
    assert sum(t.num_failures for t in decoder.stats().transfers) == 0
    sent = {c.rank: c.num_bytes for c in prefiller.stats().collectives if c.kind == "cp.all_gather"}
    assert len(sent) == 4
    assert min(sent.values()) > 0, "a rank had no part in it"
    service.assert_idle()


def test_every_row_of_a_prompt_can_be_asked_for(service: Service, tiny_model: Path) -> None:
    assert_prompt_logprobs(service, tiny_model, _PROMPTS[4])


def test_a_killed_rank_takes_its_prefiller_down_and_no_request(
    service: Service, tiny_model: Path
) -> None:
    prompts = [[(13 * i + n) % 290 + 3 for i in range(600)] for n in range(6)]
    expected = greedy_alone(tiny_model, prompts, _NUM_TOKENS)
    (prefiller,) = service.of_role("prefiller")
    followers = psutil.Process(prefiller.info["pid"]).children()
    assert len(followers) == 3
    with ThreadPoolExecutor(6) as pool:
        outputs = [
            pool.submit(service.generate, p, max_tokens=_NUM_TOKENS, ignore_eos=True)
            for p in prompts
        ]
        wait_until(lambda: prefiller.stats().num_running, 20, "the prefiller runs")
        os.kill(followers[-1].pid, signal.SIGKILL)
        wait_until(lambda: not prefiller.alive, 10, "the engine ends with its rank")
        service.publish()
        assert [output.result(60) for output in outputs] == expected
    service.restart(prefiller)
    assert service.generate(prompts[0], max_tokens=_NUM_TOKENS, ignore_eos=True) == expected[0]
    service.assert_idle()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefiller", "decoder"),
    [({"cp": 4, "ep": 4}, {"dp": 2, "ep": 2}), ({"cp": 2, "tp": 2, "ep": 4}, {"tp": 2})],
    ids=str,
)
async def test_tokens_of_a_mixture_of_experts_are_those_of_one_process(
    prefiller: dict[str, int], decoder: dict[str, int], tiny_model: Path, tmp_path: Path
) -> None:
    model = write_tiny_experts(tmp_path, tiny_model)
    expected = greedy_alone(model, _PROMPTS, _NUM_TOKENS)
    with Service(model, prefiller=_over(**prefiller), decoder=_over(**decoder)) as service:
        assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected
        service.assert_idle()


@pytest.mark.slow
def test_prefixes_in_the_tiers_are_found_by_all_ranks(tiny_model: Path, tmp_path: Path) -> None:
    tiers = TierConfig(disk_path=f"{tmp_path}/tier")
    options = {"max_tokens": _NUM_TOKENS, "ignore_eos": True}
    with Service(tiny_model, prefiller={**_over(cp=2), "tiers": tiers}) as service:
        first = service.complete(_PROMPTS[5], **options)
        num_blocks = len(_PROMPTS[5]) // 32
        wait_until(lambda: len(list(tmp_path.glob("*/*/*/*"))) == num_blocks, 20, "all are kept")
        for worker in service.workers:
            worker.close()
        for worker in list(service.workers):
            service.restart(worker)
        service.wait_ready()
        again = service.complete(_PROMPTS[5], **options)
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == num_blocks * 32
        service.assert_idle()
