"""Int8 KV in the service: the tokens of one process, resharded, in chunks, through preemption."""

from pathlib import Path
from typing import Any

import pytest

from engine.parallel_config import ParallelConfig
from tests.integration.alone import greedy_alone
from tests.integration.service import Service

pytestmark = pytest.mark.multiprocess

_NUM_TOKENS = 256
_NUM_BLOCKS = 30  # all prompts fit, all outputs do not
_PROMPTS = [[3 + (7 * i + n * i * i) % 290 for i in range(n)] for n in (1, 31, 33, 64, 200, 500)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """Greedy tokens of one process with an int8 cache."""
    return greedy_alone(tiny_model, _PROMPTS, _NUM_TOKENS, cache_dtype="int8")


@pytest.mark.parametrize(
    ("worker", "decoder"),
    [
        pytest.param({}, {"parallel": ParallelConfig(tp_size=2)}, id="resharded"),
        pytest.param(
            {"max_num_batched_tokens": 64}, {"num_blocks": _NUM_BLOCKS}, id="chunks, small pool"
        ),
    ],
)
async def test_disaggregated_tokens_are_those_of_one_process(
    worker: dict[str, Any], decoder: dict[str, Any], tiny_model: Path, expected: list[list[int]]
) -> None:
    with Service(
        tiny_model,
        worker={"kv_cache_dtype": "int8", **worker},
        decoder=decoder,
        proxy={"local_prefill_tokens": 8},
    ) as service:
        assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected
        assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected, (
            "a warm prefix cache changed tokens"
        )
        (prefiller,) = service.of_role("prefiller")
        stats = prefiller.stats()
        assert sum(peer.num_transfers for peer in stats.transfers) >= 5
        # 2 layers of K and V, 2 heads of 16: a byte each, and 4 for the scale of the 16.
        assert (stats.kv_cache_dtype, stats.kv_block_bytes) == ("int8", 2 * 2 * 2 * 32 * (16 + 4))
        if "num_blocks" in decoder:
            (worker_process,) = service.of_role("decoder")
            assert worker_process.stats().num_preemptions > 0
        service.assert_idle()
