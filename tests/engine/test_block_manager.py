"""The block pool: reference counts, the prefix cache, its eviction order and quarantine."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_manager import BlockManager
from engine.request import Request, SamplingParams
from protos.block_hash import hash_blocks


def make_request(token_ids: list[int], name: str = "r", salt: str = "", **sampling) -> Request:
    return Request(
        name, 0, list(token_ids), len(token_ids), SamplingParams(**sampling), cache_salt=salt
    )


def compute(manager: BlockManager, request: Request) -> None:
    """Give the request blocks for all its tokens and pretend to have run them."""
    manager.attach_prefix(request)
    assert manager.allocate(request, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    manager.register_computed(request)


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockManager(0, 4)


def test_allocate_grows_to_whole_blocks_and_counts_them_as_held():
    manager = BlockManager(8, 4)
    request = make_request([1] * 9)
    assert manager.allocate(request, 1)
    assert len(request.block_ids) == 1
    assert manager.allocate(request, 4)
    assert len(request.block_ids) == 1
    assert manager.allocate(request, 9)
    assert len(set(request.block_ids)) == 3
    assert (manager.num_held_blocks, manager.num_free_blocks) == (3, 5)
    manager.check_integrity([request])


def test_allocate_beyond_the_pool_changes_nothing():
    manager = BlockManager(3, 4)
    request = make_request([1] * 20)
    assert manager.allocate(request, 5)
    before = list(request.block_ids)
    assert not manager.allocate(request, 20)
    assert request.block_ids == before
    manager.check_integrity([request])


def test_free_returns_all_blocks_and_may_be_repeated():
    manager = BlockManager(4, 4)
    request = make_request(list(range(10)))
    compute(manager, request)
    manager.free(request)
    manager.free(request)
    assert request.block_ids == []
    assert manager.num_held_blocks == 0
    manager.check_integrity([])


def test_equal_prompt_shares_all_full_blocks_but_the_one_with_the_last_token():
    manager = BlockManager(8, 4)
    first, second = make_request(list(range(8)), "a"), make_request(list(range(8)), "b")
    compute(manager, first)
    assert manager.attach_prefix(second) == 4
    assert second.block_ids == first.block_ids[:1]
    assert (second.num_computed_tokens, second.num_cached_tokens) == (4, 4)
    assert second.block_hashes == hash_blocks(range(8), 4, "")
    manager.check_integrity([first, second])


def test_blocks_stay_cached_after_their_request_is_gone():
    manager = BlockManager(8, 4)
    first, second = make_request(list(range(9)), "a"), make_request(list(range(9)), "b")
    compute(manager, first)
    blocks = list(first.block_ids)
    manager.free(first)
    assert manager.num_free_blocks == 8
    assert manager.match_prefix(list(range(9)), "") == blocks[:2]
    assert manager.attach_prefix(second) == 8
    assert manager.num_free_blocks == 6
    manager.check_integrity([second])


def test_blocks_are_not_found_before_they_are_computed():
    manager = BlockManager(8, 4)
    request = make_request(list(range(9)))
    assert manager.allocate(request, 9)
    request.num_computed_tokens = 7
    manager.register_computed(request)
    assert len(manager.match_prefix(list(range(9)), "")) == 1
    request.num_computed_tokens = 9
    manager.register_computed(request)
    assert len(manager.match_prefix(list(range(9)), "")) == 2


def test_blocks_that_fill_while_decoding_are_chained_to_the_prompts_blocks():
    manager = BlockManager(8, 4)
    request = make_request(list(range(5)))
    compute(manager, request)
    for token_id in range(5, 13):
        request.token_ids.append(token_id)
        assert manager.allocate(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
        manager.register_computed(request)
    assert manager.match_prefix(list(range(13)), "") == request.block_ids[:3]
    assert request.block_hashes == hash_blocks(range(13), 4, "")


def test_another_salt_does_not_share():
    manager = BlockManager(8, 4)
    compute(manager, make_request(list(range(9)), "a", salt="x"))
    assert manager.match_prefix(list(range(9)), "y") == []
    assert len(manager.match_prefix(list(range(9)), "x")) == 2


def test_equal_block_after_another_prefix_does_not_share():
    manager = BlockManager(8, 4)
    compute(manager, make_request([1, 1, 1, 1, 5, 6, 7, 8, 9], "a"))
    assert manager.match_prefix([2, 2, 2, 2, 5, 6, 7, 8, 9], "") == []
    assert manager.match_prefix([5, 6, 7, 8, 9], "") == []


def test_the_older_of_two_equal_blocks_stays_findable():
    manager = BlockManager(8, 4)
    first, second = make_request(list(range(5)), "a"), make_request(list(range(5)), "b")
    for request in (first, second):
        assert manager.allocate(request, 5)
    for request in (first, second):
        request.num_computed_tokens = 5
        manager.register_computed(request)
    assert manager.match_prefix(list(range(5)), "") == first.block_ids[:1]
    manager.free(second)
    assert manager.match_prefix(list(range(5)), "") == first.block_ids[:1]
    manager.check_integrity([first])


def test_blocks_without_reusable_content_are_taken_before_cached_ones():
    manager = BlockManager(4, 4)
    cached, plain = make_request(list(range(9)), "a"), make_request([9] * 4, "b")
    compute(manager, cached)
    assert manager.allocate(plain, 4)
    manager.free(cached)
    manager.free(plain)
    newcomer = make_request([7] * 8, "c")
    assert manager.allocate(newcomer, 8)
    assert len(manager.match_prefix(list(range(9)), "")) == 2


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    manager = BlockManager(4, 4)
    cached = make_request(list(range(16)))
    compute(manager, cached)
    blocks = list(cached.block_ids)
    manager.free(cached)
    newcomer = make_request([7] * 8, "b")
    assert manager.allocate(newcomer, 8)
    assert manager.match_prefix(list(range(16)), "") == blocks[:2]
    manager.check_integrity([newcomer])


def test_the_least_recently_used_prefix_is_evicted_first():
    manager = BlockManager(4, 4)
    old, new = [1] * 5, [2] * 5
    for token_ids in (old, new, old):
        request = make_request(token_ids, str(token_ids))
        compute(manager, request)
        manager.free(request)
    newcomer = make_request([7] * 12, "c")
    assert manager.allocate(newcomer, 12)
    assert manager.match_prefix(new, "") == []
    assert len(manager.match_prefix(old, "")) == 1


def test_fits_counts_cached_free_blocks_that_would_be_attached():
    manager = BlockManager(3, 4)
    cached = make_request(list(range(9)), "a")
    compute(manager, cached)
    manager.free(cached)
    request = make_request(list(range(12)), "b")
    assert manager.fits(request, 12)
    assert not manager.fits(request, 12, num_spare_blocks=1)
    assert not manager.fits(request, 13)
    assert manager.num_held_blocks == 0


def test_fits_does_not_count_blocks_that_another_request_holds():
    manager = BlockManager(4, 4)
    holder = make_request(list(range(9)), "a")
    compute(manager, holder)
    request = make_request(list(range(12)), "b")
    assert manager.fits(request, 12)
    assert not manager.fits(request, 13)
    manager.attach_prefix(request)
    assert manager.allocate(request, 12)
    assert manager.num_free_blocks == 0


def test_queries_and_hits_count_tokens_once_per_request():
    manager = BlockManager(8, 4)
    first, second = make_request(list(range(9)), "a"), make_request(list(range(9)), "b")
    compute(manager, first)
    compute(manager, second)
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (18, 8)
    manager.free(second)
    second.num_cached_tokens = 4
    assert manager.attach_prefix(second, resumed=True) == 8
    assert second.num_cached_tokens == 4
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (18, 8)


def test_a_request_for_prompt_logprobs_computes_every_token():
    manager = BlockManager(8, 4)
    compute(manager, make_request(list(range(9)), "a"))
    assert manager.attach_prefix(make_request(list(range(9)), "b", num_prompt_logprobs=0)) == 0


def test_quarantined_blocks_are_neither_free_nor_cached_until_released():
    manager = BlockManager(8, 4)
    holder = make_request(list(range(9)), "a")
    compute(manager, holder)
    reserved = make_request(list(range(16)), "b")
    manager.attach_prefix(reserved)
    assert manager.allocate(reserved, 16)
    own = reserved.block_ids[2:]
    assert manager.quarantine(reserved) == own
    assert reserved.block_ids == []
    assert manager.num_quarantined_blocks == 2
    assert manager.num_held_blocks == 5
    manager.check_integrity([holder])
    grabber = make_request([5] * 12, "c")
    assert manager.allocate(grabber, 12)
    assert not set(grabber.block_ids) & set(own)
    assert not manager.allocate(grabber, 16)
    manager.release_quarantined(own)
    assert manager.allocate(grabber, 20)
    manager.check_integrity([holder, grabber])


def test_releasing_a_block_that_is_not_quarantined_is_refused():
    manager = BlockManager(2, 4)
    with pytest.raises(ValueError, match="block 1 is not quarantined"):
        manager.release_quarantined([1])


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=14), st.sampled_from(["", "tenant"])
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 3),
    st.integers(6, 30),
)
def test_every_cached_block_holds_the_tokens_it_is_found_by(prompts, block_size, num_blocks):
    manager = BlockManager(num_blocks, block_size)
    content: dict[int, tuple[str, tuple[int, ...]]] = {}
    live: list[Request] = []
    for index, (token_ids, salt) in enumerate(prompts):
        request = make_request(token_ids, str(index), salt)
        while live and not manager.fits(request, request.num_tokens):
            manager.free(live.pop(0))
        if not manager.fits(request, request.num_tokens):
            continue
        num_cached = manager.attach_prefix(request)
        assert num_cached < request.num_tokens
        for place, block_id in enumerate(request.block_ids):
            end = (place + 1) * block_size
            assert content[block_id] == (salt, tuple(token_ids[:end]))
        assert manager.allocate(request, request.num_tokens)
        for place, block_id in enumerate(request.block_ids):
            content[block_id] = (salt, tuple(token_ids[: (place + 1) * block_size]))
        request.num_computed_tokens = request.num_tokens
        manager.register_computed(request)
        live.append(request)
        manager.check_integrity(live)
    for request in live:
        manager.free(request)
    manager.check_integrity([])
    assert manager.num_free_blocks == num_blocks
