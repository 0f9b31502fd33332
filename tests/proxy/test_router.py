"""Placement: pure functions on snapshots."""

from hypothesis import given
from hypothesis import strategies as st

from protos import worker_pb2
from proxy.prefix_index import PrefixIndex
from proxy.router import (
    Candidate,
    Router,
    WorkerSnapshot,
    choose,
    helps_out,
    score,
)
from proxy.session import Identity

P, D = worker_pb2.ROLE_PREFILLER, worker_pb2.ROLE_DECODER


def worker(name: str, **fields: object) -> WorkerSnapshot:
    return WorkerSnapshot(**{"identity": (name, 1), "role": D, **fields})  # type: ignore[arg-type]


def candidate(
    request_id: str = "r",
    num_tokens: int = 1000,
    matched: dict[Identity, int] | None = None,
    failures: dict[Identity, int] | None = None,
) -> Candidate:
    return Candidate(
        request_id=request_id,
        num_tokens=num_tokens,
        matched_tokens=matched or {},
        num_failures=failures or {},
        seen={(name, 1) for name in "abcdef"},
    )


snapshots = st.builds(
    WorkerSnapshot,
    identity=st.tuples(st.sampled_from("abcdef"), st.integers(1, 3)),
    role=st.sampled_from([P, D]),
    is_draining=st.booleans(),
    num_active=st.integers(0, 1000),
    num_pending_tokens=st.integers(0, 100_000),
    kv_usage=st.floats(0, 1),
    max_model_len=st.sampled_from([0, 1000, 1001, 8192]),
)
identities = st.tuples(st.sampled_from("abcdef"), st.integers(1, 3))


@given(
    workers=st.lists(snapshots, max_size=8, unique_by=lambda w: w.identity),
    role=st.sampled_from([P, D]),
    failures=st.dictionaries(identities, st.integers(0, 3)),
    excluded=st.sets(identities),
)
def test_the_choice_is_a_fitting_worker_with_the_lowest_score(
    workers: list[WorkerSnapshot],
    role: "worker_pb2.Role.ValueType",
    failures: dict[Identity, int],
    excluded: set[Identity],
) -> None:
    wanted = candidate(failures=failures)
    chosen = choose(workers, role, wanted, max_failures=2, excluded=excluded)
    fitting = {
        w.identity: w
        for w in workers
        if w.role == role
        and not w.is_draining
        and w.identity not in excluded
        and failures.get(w.identity, 0) < 2
        and w.max_model_len != 1000
    }
    if not fitting:
        assert chosen is None
        return
    assert chosen is not None
    assert score(fitting[chosen], wanted) == min(score(w, wanted) for w in fitting.values())
    assert choose(workers, role, wanted, max_failures=2, excluded=excluded) == chosen


def test_a_matching_prefix_attracts_and_queued_work_repels() -> None:
    workers = [worker("a"), worker("b")]
    matched = candidate(matched={("b", 1): 960})
    assert choose(workers, D, matched, max_failures=1) == ("b", 1)
    busy = [worker("a"), worker("b", num_pending_tokens=2000)]
    assert choose(busy, D, matched, max_failures=1) == ("a", 1)


def test_a_small_common_preamble_does_not_pull_requests_together() -> None:
    workers = [worker("a"), worker("b")]
    chosen = {
        choose(workers, D, candidate(str(i), matched={("b", 1): 64}), max_failures=1)
        for i in range(32)
    }
    assert chosen == {("a", 1), ("b", 1)}


def test_equal_workers_share_requests_evenly() -> None:
    workers = [worker("a"), worker("b"), worker("c")]
    chosen = [choose(workers, D, candidate(str(i)), max_failures=1) for i in range(300)]
    assert all(chosen.count((name, 1)) > 60 for name in "abc")


def test_a_worker_that_failed_once_is_the_last_resort() -> None:
    failed = candidate(failures={("a", 1): 1})
    busy = [worker("a"), worker("b", num_active=900, kv_usage=1.0)]
    assert choose(busy, D, failed, max_failures=2) == ("b", 1)
    assert choose(busy[:1], D, failed, max_failures=2) == ("a", 1)


def test_a_new_worker_is_tried_although_others_hold_the_prefix() -> None:
    workers = [worker("a"), worker("b", identity=("b", 2))]
    matched = candidate(matched={("a", 1): 992})
    assert choose(workers, D, matched, max_failures=1) == ("b", 2)
    busy = [worker("a"), worker("b", identity=("b", 2), num_pending_tokens=5000)]
    assert choose(busy, D, matched, max_failures=1) == ("a", 1)


def test_a_worker_is_no_choice_for_a_request_that_it_cannot_hold() -> None:
    workers = [worker("a", max_model_len=1000), worker("b", num_active=900, kv_usage=1.0)]
    assert choose(workers, D, candidate(num_tokens=999), max_failures=1) == ("a", 1)
    assert choose(workers, D, candidate(num_tokens=1000), max_failures=1) == ("b", 1)
    assert choose(workers[:1], D, candidate(num_tokens=1000), max_failures=1) is None


def test_full_pools_are_avoided() -> None:
    workers = [worker("a", kv_usage=0.95), worker("b", kv_usage=0.2, num_active=10)]
    assert choose(workers, D, candidate(), max_failures=1) == ("b", 1)


def test_the_index_counts_leading_blocks_per_worker() -> None:
    router = Router()
    tokens = list(range(32 * 6))
    hashes = router.hash_prompt(tokens, 32, "")
    router.note(hashes, ("a", 1))
    router.note(hashes[:2], ("b", 1))
    found = router.candidate("r", len(tokens), hashes, 32, {}).matched_tokens
    assert found == {("a", 1): 192, ("b", 1): 64}
    other = router.hash_prompt(tokens, 32, "another tenant")
    assert router.candidate("r", len(tokens), other, 32, {}).matched_tokens == {}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=60))
def test_the_index_stays_within_its_bound(additions: list[tuple[int, int]]) -> None:
    index = PrefixIndex(max_blocks=10)
    for start, length in additions:
        index.add([bytes([i]) for i in range(start, start + length)], ("a", 1))
        assert len(index) <= 10
    if additions:
        start, length = additions[-1]
        assert index.match([bytes([i]) for i in range(start, start + length)]) == {("a", 1): length}


def test_a_decoder_helps_a_prefiller_out_only_if_that_is_quicker_and_few_notice() -> None:
    busy = worker("p", role=P, num_pending_tokens=600)
    assert helps_out(worker("d", num_active=3), busy, num_uncached=512)
    assert helps_out(worker("d", num_active=3), busy, num_uncached=1200)
    assert not helps_out(worker("d", num_active=3), busy, num_uncached=1300)
    assert not helps_out(worker("d", num_active=30), busy, num_uncached=512)
    assert not helps_out(worker("d", num_pending_tokens=64), busy, num_uncached=512)
    assert not helps_out(worker("d"), worker("p", role=P, num_pending_tokens=100), num_uncached=64)
