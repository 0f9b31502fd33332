"""Products with rounded activations in the service: tokens of one process, whatever is batched."""

from pathlib import Path
from typing import Any

import pytest

from kernels.cpu.options import ActivationBits, CpuOptions
from tests.integration.alone import greedy_alone
from tests.integration.service import Service

pytestmark = pytest.mark.multiprocess

_NUM_TOKENS = 128
# NOTE: so many that some always wait: a decoder that is ahead of its prefiller preempts none.
_PROMPTS = [
    [3 + (7 * i + n * i * i + first) % 290 for i in range(n)]
    for first in (0, 90, 180, 270)
    for n in (1, 31, 33, 64, 200, 500)
]
_FEW_PROMPTS = _PROMPTS[:6]  # whose first tokens are the same with float activations


@pytest.mark.parametrize("bits", [8, 16])
async def test_disaggregated_tokens_are_those_of_one_process(
    bits: ActivationBits, tiny_model: Path
) -> None:
    options: dict[str, Any] = {
        "quantization": "int4",
        "cpu": CpuOptions(activation_bits=bits),
    }
    expected = greedy_alone(tiny_model, _PROMPTS, _NUM_TOKENS, **options)
    with Service(
        tiny_model,
        worker={"max_num_batched_tokens": 64, **options},
        decoder={"num_blocks": 26},  # all prompts fit, all outputs do not
        proxy={"local_prefill_tokens": 8},
    ) as service:
        assert await service.generate_all(_PROMPTS, _NUM_TOKENS) == expected
        (decoder,) = service.of_role("decoder")
        assert decoder.stats().num_preemptions > 0
        assert sum(peer.num_transfers for peer in service.of_role("prefiller")[0].stats().transfers)
        service.assert_idle()


async def test_kv_of_a_worker_that_fell_back_to_floats_is_refused(tiny_model: Path) -> None:
    options: dict[str, Any] = {"quantization": "int4", "cpu": CpuOptions(activation_bits=8)}
    expected = greedy_alone(tiny_model, _FEW_PROMPTS, _NUM_TOKENS, **options)
    with Service(
        tiny_model,
        worker=options,
        prefiller={"ops_backend": "reference"},
        proxy={"local_prefill_tokens": 8},
    ) as service:
        assert await service.generate_all(_FEW_PROMPTS, _NUM_TOKENS) == expected
        stats = service.of_role("prefiller")[0].stats()
        assert not sum(peer.num_transfers for peer in stats.transfers)
        service.assert_idle()
