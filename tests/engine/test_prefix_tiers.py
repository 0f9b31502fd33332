"""The policy of the tiers, with real memory and real tiers; the engine thread is the test."""

import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.block_manager import BlockManager
from engine.prefix_tiers import PrefixTiers, TierEvent
from engine.request import Request, RequestKey, SamplingParams
from engine.tier_worker import TierWorker
from kvtransfer.layout import KVLayout
from kvtransfer.registration import KVMemory
from kvtransfer.tiers.base import TierStack
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.host import HostTier

LAYOUT = KVLayout(dtype="float32", num_layers=2, num_kv_heads=2, head_dim=4, block_size=4)
PROMPT = list(range(100, 123))


def request(name: str, token_ids: list[int]) -> Request:
    return Request(
        request_id=name,
        attempt=0,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(),
        cache_salt="model",
    )


class Worker:
    """Cache, blocks and tiers of one worker, as its loop would drive them."""

    def __init__(self, stack: TierStack, num_blocks: int = 16, max_pinned_blocks: int = 3):
        self.memory = KVMemory.allocate(LAYOUT, num_blocks)
        self.tiers = PrefixTiers(
            TierWorker(stack, self.memory),
            max_pinned_blocks=max_pinned_blocks,
            num_blocks=num_blocks,
        )
        self.blocks = BlockManager(num_blocks, LAYOUT.block_size, [self.tiers])
        self.events: queue.Queue[TierEvent] = queue.Queue()
        self.tiers.start(self.blocks, self.events.put)

    def compute(self, name: str, token_ids: list[int]) -> Request:
        """Prefill a prompt: a block's content follows from its tokens."""
        made = request(name, token_ids)
        self.blocks.attach_prefix(made)
        assert self.blocks.allocate(made, len(token_ids))
        for index, block_id in enumerate(made.block_ids):
            for caches in self.memory.caches:
                for layer_idx, cache in enumerate(caches):
                    cache[block_id] = float(sum(token_ids[: (index + 1) * 4]) + layer_idx)
        made.num_computed_tokens = len(token_ids)
        self.blocks.register_computed(made)
        return made

    def pump(self, until: object = None) -> list[RequestKey]:
        """Hand events on until `until` is ready, or until nothing is pinned."""
        ready: list[RequestKey] = []
        deadline_s = time.monotonic() + 5
        while until not in ready if until else self.blocks.num_held_blocks:
            ready += self.tiers.on_tier_event(
                self.events.get(timeout=deadline_s - time.monotonic())
            )
        return ready

    def close(self) -> None:
        self.tiers.close()
        self.memory.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(TierStack((HostTier(1 << 20), DiskTier(tmp_path, "n", 1 << 20))))
    yield made
    made.close()


def test_computed_blocks_reach_every_tier_and_nothing_stays_held(
    worker: Worker, tmp_path: Path
) -> None:
    made = worker.compute("a", PROMPT)
    worker.blocks.free(made)
    worker.pump()
    stats = {tier.tier: tier for tier in worker.tiers.stats()}
    assert stats["host"].num_written_blocks == 5
    worker.tiers.close()
    assert len(list(tmp_path.glob("n/*/*"))) == 5
    worker.blocks.check_integrity([])


def test_another_worker_finds_a_prefix_after_the_first_is_gone(tmp_path: Path) -> None:
    first = Worker(TierStack((DiskTier(tmp_path, "n", 1 << 20),)))
    made = first.compute("a", PROMPT)
    expected = [cache[made.block_ids[:5]].clone() for cache in first.memory.k_caches]
    first.blocks.free(made)
    first.pump()
    first.close()
    second = Worker(TierStack((DiskTier(tmp_path, "n", 1 << 20),)))
    asked = request("b", PROMPT)
    assert second.tiers.lookup(asked)
    assert second.pump(asked.key) == [asked.key]
    assert second.blocks.attach_prefix(asked) == 20
    assert asked.num_cached_tokens == 20
    for ours, want in zip(second.memory.k_caches, expected, strict=True):
        assert torch.equal(ours[asked.block_ids], want)
    assert second.tiers.num_promoted_blocks == 5
    second.blocks.free(asked)
    second.pump()
    second.blocks.check_integrity([])
    second.close()


def test_only_the_blocks_before_a_damaged_one_are_used(tmp_path: Path) -> None:
    first = Worker(TierStack((DiskTier(tmp_path, "n", 1 << 20),)))
    made = first.compute("a", PROMPT)
    third = made.block_hashes[2].hex()
    first.blocks.free(made)
    first.pump()
    first.close()
    (path,) = tmp_path.glob(f"n/*/{third}")
    path.write_bytes(path.read_bytes()[:-7])
    second = Worker(TierStack((DiskTier(tmp_path, "n", 1 << 20),)))
    asked = request("b", PROMPT)
    assert second.tiers.lookup(asked)
    second.pump(asked.key)
    assert second.blocks.attach_prefix(asked) == 8
    assert second.tiers.stats()[0].num_corrupt_blocks == 1
    assert not path.exists()
    second.blocks.free(asked)
    second.pump()
    assert second.blocks.num_held_blocks == 0
    second.close()


def test_two_requests_for_one_prefix_fetch_it_once(tmp_path: Path) -> None:
    first = Worker(TierStack((DiskTier(tmp_path, "n", 1 << 20),)))
    first.blocks.free(first.compute("a", PROMPT))
    first.pump()
    first.close()
    second = Worker(TierStack((DiskTier(tmp_path, "n", 1 << 20),)))
    one, two = request("one", PROMPT), request("two", PROMPT)
    assert second.tiers.lookup(one)
    assert second.tiers.lookup(two)
    ready = second.pump(two.key)
    assert set(ready) == {one.key, two.key}
    assert second.tiers.num_promoted_blocks == 5
    assert second.tiers.stats()[0].num_read_blocks == 5
    second.close()


def test_a_request_that_is_over_is_not_named_and_its_fetch_is_kept(tmp_path: Path) -> None:
    first = Worker(TierStack((DiskTier(tmp_path, "n", 1 << 20),)))
    first.blocks.free(first.compute("a", PROMPT))
    first.pump()
    first.close()
    second = Worker(TierStack((DiskTier(tmp_path, "n", 1 << 20),)))
    asked = request("b", PROMPT)
    assert second.tiers.lookup(asked)
    assert second.tiers.on_tier_event(second.events.get(timeout=5)) == []
    second.tiers.forget(asked.key)
    assert second.tiers.on_tier_event(second.events.get(timeout=5)) == []
    assert second.blocks.attach_prefix(asked) == 20
    second.blocks.free(asked)
    second.pump()
    assert second.blocks.num_held_blocks == 0
    second.close()


def test_what_left_the_cache_before_it_was_written_is_skipped(worker: Worker) -> None:
    for number in range(6):
        prompt = list(range(number * 1000, number * 1000 + 21))
        worker.blocks.free(worker.compute(str(number), prompt))
    worker.pump()
    worker.blocks.check_integrity([])
    assert worker.tiers.stats()[0].num_written_blocks >= 5


def test_a_lookup_that_takes_too_long_lets_the_request_go(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.prefix_tiers._FIND_TIMEOUT_S", 0.0)
    asked = request("b", PROMPT)
    assert worker.tiers.lookup(asked)
    assert worker.tiers.overdue() == [asked.key]
    assert worker.tiers.on_tier_event(worker.events.get(timeout=5)) == []


def test_without_tiers_nothing_is_asked_or_kept() -> None:
    worker = Worker(TierStack(()))
    made = worker.compute("a", PROMPT)
    assert not worker.tiers.lookup(request("b", PROMPT))
    worker.blocks.free(made)
    assert worker.blocks.num_held_blocks == 0
    assert worker.tiers.stats() == []
    worker.close()
