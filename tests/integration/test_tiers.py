"""A prefix outlives the worker that computed it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from mooncake.store import MooncakeDistributedStore

from engine.parallel_config import ParallelConfig
from kvtransfer.tiers.config import TierConfig
from kvtransfer.tiers.frame import pack_header
from kvtransfer.tiers.store import StoreTier
from protos import worker_pb2
from protos.block_hash import block_salt, hash_blocks, kv_identity
from tests.integration.service import Service, wait_until
from tests.oracle import story

pytestmark = pytest.mark.multiprocess

_PREFIX_TOKENS = 640
_BLOCK_SIZE = 32
_SALT = block_salt(
    kv_identity("test-model", worker_pb2.KVLayout(dtype="float32", weights="none")), "", ""
)


def _cached_tokens(reply: dict[str, object]) -> int:
    usage = reply["usage"]
    assert isinstance(usage, dict)
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def _restart_all(service: Service, meanwhile: Callable[[], object] = lambda: None) -> None:
    for worker in service.workers:
        worker.kill()
    service.publish()
    meanwhile()
    for worker in list(service.workers):
        service.restart(worker)
    service.wait_ready()


def _written(service: Service) -> int:
    return sum(tier.num_written_blocks for w in service.workers for tier in w.stats().tiers)


def _is_kept(folder: Path, prompts: Sequence[list[int]], num_ranks: int) -> bool:
    names = [h.hex() for prompt in prompts for h in hash_blocks(prompt, _BLOCK_SIZE, _SALT)]
    return all(len(list(folder.glob(f"*/*/{name}"))) == num_ranks for name in names)


def test_a_prefix_on_disk_is_found_by_another_prefiller_and_after_a_full_restart(
    packaged_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tier"
    tiers = TierConfig(disk_path=str(folder), disk_bytes=1 << 30)
    prompt, spoilt = (story(_PREFIX_TOKENS + 20, seed=seed) for seed in (5, 7))
    num_blocks = _PREFIX_TOKENS // _BLOCK_SIZE
    with Service(packaged_model, worker={"tiers": tiers}) as service:
        first = service.complete(prompt, max_tokens=8)
        first_spoilt = service.complete(spoilt, max_tokens=8)
        assert _cached_tokens(first) == 0
        wait_until(lambda: _is_kept(folder, (prompt, spoilt), 1), 60, "the prefixes are on disk")
        service.assert_idle()
        # A damaged file costs the blocks from it on, and no more.
        damaged = hash_blocks(spoilt, _BLOCK_SIZE, _SALT)[3]

        def damage() -> None:
            (path,) = folder.glob(f"*/*/{damaged.hex()}")
            path.write_bytes(path.read_bytes()[:-1])

        # NOTE: not while a worker lives that may just write the same block.
        _restart_all(service, damage)
        again = service.complete(prompt, max_tokens=8)
        assert _cached_tokens(again) == _PREFIX_TOKENS
        assert again["choices"] == first["choices"]
        (prefiller,) = service.of_role("prefiller")
        stats = prefiller.stats()
        assert stats.num_promoted_blocks == num_blocks
        assert stats.num_computed_tokens == 20
        again = service.complete(spoilt, max_tokens=8)
        assert _cached_tokens(again) == 3 * _BLOCK_SIZE
        assert again["choices"] == first_spoilt["choices"]
        service.assert_idle()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 16 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
store.close()
"""


@contextmanager
def _mooncake_store() -> Iterator[str]:
    """The address of a master, with one process that lends it memory."""
    address = f"127.0.0.1:{_free_port()}"
    master = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("mooncake_master")),
            *("--rpc_address=127.0.0.1", f"--rpc_port={address.rpartition(':')[2]}"),
            f"--metrics_port={_free_port()}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    lender = None
    try:
        deadline = time.monotonic() + 20
        while True:
            with socket.socket() as probe:
                host, _, port = address.rpartition(":")
                if probe.connect_ex((host, int(port))) == 0:
                    break
            assert time.monotonic() < deadline, "mooncake_master does not listen"
            time.sleep(0.1)
        lender = subprocess.Popen(
            [sys.executable, "-c", _LENDER, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "MC_LOG_LEVEL": "ERROR"},
        )
        assert lender.stdout is not None
        assert lender.stdout.readline().strip() == b"0"
        yield address
    finally:
        for process in (lender, master):
            if process is not None:
                process.terminate()
                process.wait(10)
        if lender is not None:
            for stream in (lender.stdin, lender.stdout):
                if stream is not None:
                    stream.close()


def test_a_prefix_in_the_store_outlives_all_workers(
    packaged_model: Path,
) -> None:
    prompt = story(_PREFIX_TOKENS + 20, seed=6)
    with _mooncake_store() as address:
        tiers = TierConfig(store_address=address)
        with Service(packaged_model, worker={"tiers": tiers}) as service:
            first = service.complete(prompt, max_tokens=8)
            num_blocks = _PREFIX_TOKENS // _BLOCK_SIZE
            wait_until(lambda: _written(service) >= num_blocks, 20, "the prefix is in the store")
            _restart_all(service)
            again = service.complete(prompt, max_tokens=8)
            assert _cached_tokens(again) == _PREFIX_TOKENS
            assert again["choices"] == first["choices"]
            service.assert_idle()


def test_a_damaged_value_of_the_store_is_a_miss_and_is_removed() -> None:
    block_hash, data = bytes(range(16)), memoryview(bytes(range(250)) * 4)
    frame = pack_header(block_hash, data) + bytes(data)
    flipped = bytearray(frame)
    flipped[-7] ^= 16
    into = memoryview(bytearray(len(data)))
    with _mooncake_store() as address:
        tier = StoreTier(address, "model", host="127.0.0.1", segment_bytes=0, buffer_bytes=16 << 20)
        other = MooncakeDistributedStore()
        setup = "127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", address
        assert other.setup(*setup) == 0
        for number, damaged in enumerate((bytes(flipped), frame[:-1], frame + b"0", b"0"), 1):
            assert other.put(f"pdserve/model/{block_hash.hex()}", damaged) == 0
            assert tier.contains([block_hash]) == [True]
            assert not tier.read(block_hash, into)
            assert tier.counters.num_corrupt == number
            assert tier.contains([block_hash]) == [False]
        assert tier.write(block_hash, data)
        assert tier.read(block_hash, into)
        assert into == data
        other.close()
    # The master is gone: a miss, and it is not asked again for every block.
    assert tier.contains([block_hash]) == [False]
    assert not tier.read(block_hash, into)
    assert not tier.write(bytes(16), data)
    assert tier.counters.num_failures == 1
    tier.close()


@pytest.mark.parametrize("role", [pytest.param("prefiller", marks=pytest.mark.slow), "decoder"])
def test_ranks_find_a_prefix_where_each_has_its_part_and_decoders_fetch_too(
    role: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tier"
    num_blocks = 5
    whole, partly = (
        [3 + (7 * i + n * i * i) % 290 for i in range(num_blocks * _BLOCK_SIZE + 20)]
        for n in (1, 2)
    )
    with Service(
        tiny_model,
        prefillers=int(role == "prefiller"),
        worker={
            "tiers": TierConfig(disk_path=str(folder)),
            "parallel": ParallelConfig(tp_size=2),
        },
    ) as service:
        first = [service.complete(prompt, max_tokens=8) for prompt in (whole, partly)]

        wait_until(lambda: _is_kept(folder, (whole, partly), 2), 60, "both ranks have theirs")
        service.assert_idle()
        # One rank loses its part of a block.
        lost = hash_blocks(partly, _BLOCK_SIZE, _SALT)[2]
        _restart_all(service, lambda: next(folder.glob(f"*/*/{lost.hex()}")).unlink())
        again = [service.complete(prompt, max_tokens=8) for prompt in (whole, partly)]
        assert [_cached_tokens(r) for r in again] == [num_blocks * _BLOCK_SIZE, 2 * _BLOCK_SIZE]
        assert [r["choices"] for r in again] == [r["choices"] for r in first]
        (worker,) = service.of_role(role)
        assert worker.stats().num_promoted_blocks == num_blocks + 2
        service.assert_idle()


def test_every_data_parallel_rank_writes_and_reads_for_its_own_requests(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tier"
    num_blocks = 5
    prompts = [
        [3 + (7 * i + n * i * i) % 290 for i in range(num_blocks * _BLOCK_SIZE + 20)]
        for n in (1, 2)
    ]
    with Service(
        tiny_model,
        prefillers=0,
        worker={
            "tiers": TierConfig(disk_path=str(folder)),
            "parallel": ParallelConfig(dp_size=2),
        },
    ) as service:
        first = _complete_side_by_side(service, prompts)
        # What the two ranks hold is alike, and so has one name.
        wait_until(lambda: _is_kept(folder, prompts, 1), 60, "both prefixes are on disk")
        _restart_all(service)
        again = _complete_side_by_side(service, prompts)
        assert [_cached_tokens(reply) for reply in again] == 2 * [num_blocks * _BLOCK_SIZE]
        assert [reply["choices"] for reply in again] == [reply["choices"] for reply in first]
        stats = service.of_role("decoder")[0].stats()
        assert stats.num_promoted_blocks == 2 * num_blocks
        (of_leader,) = stats.tiers
        assert of_leader.num_read_blocks == num_blocks, "the other rank read the other prefix"
        service.assert_idle()


def _complete_side_by_side(
    service: Service, prompts: Sequence[list[int]]
) -> list[dict[str, object]]:
    """Two requests, the second while the first runs: each has a data-parallel rank of its own."""
    (decoder,) = service.of_role("decoder")
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(service.complete, prompts[0], max_tokens=300, ignore_eos=True)
        wait_until(lambda: decoder.stats().num_running == 1, 30, "the first one runs")
        short = service.complete(prompts[1], max_tokens=8, ignore_eos=True)
        assert not long.done(), "both may have been on one rank"
        return [long.result(), short]
