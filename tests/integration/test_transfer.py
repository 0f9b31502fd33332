"""KV really moves, by the transport that was asked for, between every pair of workers."""

import asyncio
from collections import defaultdict
from pathlib import Path

import pytest

from tests.integration.service import Service
from tests.integration.streams import prompt_of

pytestmark = pytest.mark.multiprocess

_BLOCK_SIZE = 32


@pytest.mark.parametrize("transport", ["mooncake", "memory"])
async def test_every_pair_transfers_and_bytes_are_blocks_times_block_bytes(
    tiny_model: Path, transport: str
) -> None:
    with Service(
        tiny_model, prefillers=2, decoders=2, worker={"transfer": {"transport": transport}}
    ) as service:
        lengths = [33 + 17 * (i % 20) for i in range(60)]
        prompts = [prompt_of(length, i) for i, length in enumerate(lengths)]
        await asyncio.gather(
            *(asyncio.to_thread(service.complete, p, max_tokens=4) for p in prompts)
        )
        service.assert_idle()
        pairs: dict[tuple[str, str], int] = defaultdict(int)
        for worker in service.of_role("prefiller"):
            for peer in worker.stats().transfers:
                assert peer.transport == transport
                # 2 layers, K and V, 2 heads of 16 floats of 4 bytes
                assert peer.num_bytes == peer.num_blocks * 2 * 2 * 2 * 16 * _BLOCK_SIZE * 4
                pairs[worker.engine_id, peer.peer_engine_id] += peer.num_blocks
        assert len(pairs) == 4
        assert min(pairs.values()) > 0
        assert sum(pairs.values()) == sum(-(-n // _BLOCK_SIZE) for n in lengths)


async def test_only_blocks_that_the_decoder_lacks_are_sent(tiny_model: Path) -> None:
    with Service(tiny_model) as service:
        prompt = prompt_of(320, 1)
        first = await asyncio.to_thread(service.complete, prompt, max_tokens=4)
        second = await asyncio.to_thread(service.complete, prompt + prompt_of(64, 2), max_tokens=4)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 320
        (prefiller,) = service.of_role("prefiller")
        (peer,) = prefiller.stats().transfers
        assert peer.num_blocks == 10 + 2
