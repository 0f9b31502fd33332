"""From a worker's prefix cache to the proxy's index, by way of the messages between them."""

import random

from engine.block_manager import BlockManager
from engine.kv_events import KVEventLog
from engine.request import Request, SamplingParams
from protos import worker_pb2
from proxy.kv_subscription import KVSubscription
from proxy.prefix_index import Holder, PrefixIndex

US: Holder = ("prefiller-0", 1)
OTHER: Holder = ("prefiller-1", 1)
BLOCK_SIZE = 4


class Rig:
    """A block manager that tells one subscription; a test may lose messages between them."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.log = KVEventLog()
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE, [self.log])
        self.index = PrefixIndex()
        self.asked: list[worker_pb2.ProxyMessage] = []
        self.subscription = KVSubscription(self.index, US, self.asked.append)
        self.subscription.start()
        self.answer()

    def compute(self, seed: int, num_tokens: int) -> None:
        request = Request(
            request_id=str(seed),
            attempt=0,
            token_ids=[seed * 100 + i for i in range(num_tokens)],
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(),
        )
        self.blocks.attach_prefix(request)
        assert self.blocks.allocate(request, num_tokens)
        request.num_computed_tokens = num_tokens
        self.blocks.register_computed(request)
        self.blocks.free(request)

    def publish(self) -> None:
        if (events := self.log.take()) is not None:
            self.subscription.apply(events)

    def answer(self) -> None:
        for message in self.asked:
            assert message.HasField("resync_kv")
            self.subscription.apply(self.log.snapshot(self.blocks.findable()))
        self.asked.clear()

    def assert_equal(self) -> None:
        held = {h for h, holders in self.index._holders.items() if US in holders}
        assert held == set(self.blocks.findable())


def test_the_index_follows_what_is_stored_and_evicted() -> None:
    rig = Rig()
    rng = random.Random(4)
    for _ in range(200):
        rig.compute(rng.randrange(6), rng.randrange(1, 32))
        if rng.random() < 0.5:
            rig.publish()
    rig.publish()
    rig.assert_equal()
    assert rig.blocks.findable()
    assert rig.subscription.num_resyncs == 1


def test_a_lost_message_is_noticed_at_the_next_one_and_made_up_for() -> None:
    rig = Rig()
    rig.compute(1, 16)
    assert rig.log.take() is not None
    rig.compute(2, 20)
    rig.publish()
    assert len(rig.asked) == 1
    rig.compute(3, 8)
    rig.publish()
    assert len(rig.asked) == 1, "one answer is on its way"
    rig.answer()
    rig.assert_equal()
    rig.compute(4, 16)
    rig.publish()
    rig.assert_equal()
    assert rig.subscription.num_resyncs == 2


def test_a_repeated_message_and_a_snapshot_among_changes_change_nothing() -> None:
    rig = Rig()
    rig.compute(1, 16)
    events = rig.log.take()
    assert events is not None
    rig.subscription.apply(events)
    rig.compute(2, 32)
    rig.subscription.apply(rig.log.snapshot(rig.blocks.findable()))
    rig.subscription.apply(events)
    rig.publish()
    rig.assert_equal()
    assert not rig.asked


def test_what_a_worker_held_is_forgotten_with_its_session_and_others_stay() -> None:
    rig = Rig()
    rig.compute(1, 16)
    rig.publish()
    hashes = rig.blocks.findable()
    rig.index.add(hashes[:2], OTHER)
    rig.subscription.close()
    assert rig.index.match(hashes) == {OTHER: 2}
    assert len(rig.index) == 2


def test_a_session_that_was_never_greeted_leaves_the_hints_alone() -> None:
    index = PrefixIndex()
    index.add([bytes(16)], US)
    KVSubscription(index, US, [].append).close()
    assert index.match([bytes(16)]) == {US: 1}


def test_a_block_that_several_pools_find_is_gone_when_the_last_one_has_evicted_it() -> None:
    log = KVEventLog()
    index = PrefixIndex()
    subscription = KVSubscription(index, US, lambda message: None)
    subscription.apply(log.snapshot([]))

    def publish() -> None:
        events = log.take()
        assert events is not None
        subscription.apply(events)

    block_hash = bytes(16)
    log.stored(block_hash)
    log.stored(block_hash)
    publish()
    log.removed(block_hash)
    assert log.take() is None, "one of them has it still"
    assert index.match([block_hash]) == {US: 1}
    log.removed(block_hash)
    publish()
    assert index.match([block_hash]) == {}
