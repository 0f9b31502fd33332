import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtransfer.layout import KVLayout
from kvtransfer.registration import KVMemory
from kvtransfer.tiers.base import Tier, TierStack
from kvtransfer.tiers.blocks import gather_block, scatter_block
from kvtransfer.tiers.config import TierConfig
from kvtransfer.tiers.disk import DiskTier
from kvtransfer.tiers.frame import HEADER
from kvtransfer.tiers.host import HostTier
from kvtransfer.tiers.loading import load_tiers
from tests.kvtransfer.harness import LAYOUT

SIZE = 1000
FRAME = SIZE + HEADER.size


def block(number: int) -> tuple[bytes, memoryview]:
    return number.to_bytes(16, "big"), memoryview(bytes([number % 251]) * SIZE)


def read(tier: Tier, number: int) -> bytes | None:
    into = bytearray(SIZE)
    return bytes(into) if tier.read(block(number)[0], memoryview(into)) else None


def make(kind: str, folder: Path, num_blocks: int) -> Tier:
    if kind == "host":
        return HostTier(num_blocks * SIZE)
    return DiskTier(folder, "model", num_blocks * FRAME)


KINDS = pytest.mark.parametrize("kind", ["host", "disk"])


@KINDS
def test_a_block_comes_back_as_it_was_and_others_are_missing(kind: str, tmp_path: Path) -> None:
    tier = make(kind, tmp_path, 10)
    assert tier.write(*block(1))
    assert tier.write(*block(2))
    assert tier.contains([block(1)[0], block(3)[0], block(2)[0]]) == [True, False, True]
    assert read(tier, 1) == bytes(block(1)[1])
    assert read(tier, 3) is None
    counters = tier.counters
    assert (counters.num_read, counters.num_written, counters.num_corrupt) == (1, 2, 0)
    tier.close()


@KINDS
def test_the_bound_holds_and_what_was_used_least_recently_goes(kind: str, tmp_path: Path) -> None:
    tier = make(kind, tmp_path, 10)
    for number in range(10):
        tier.write(*block(number))
        if kind == "disk":  # files written within one tick of the clock have no order
            path = tmp_path / "model" / "00" / block(number)[0].hex()
            os.utime(path, (number, number))
    assert read(tier, 0) is not None
    assert tier.write(*block(10))
    present = tier.contains([block(number)[0] for number in range(11)])
    assert present[0]
    assert present[10]
    assert not present[1]
    assert tier.num_used_bytes() <= 10 * FRAME
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert on_disk <= 10 * FRAME
    assert tier.counters.num_evicted >= 1
    assert not tier.write(b"x" * 16, memoryview(bytes(11 * FRAME)))
    tier.close()


@pytest.mark.parametrize("damage", ["truncate", "flip", "append", "header", "empty"])
def test_a_damaged_file_is_a_miss_and_is_deleted(damage: str, tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", 10 * FRAME)
    tier.write(*block(7))
    path = tmp_path / "model" / "00" / block(7)[0].hex()
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        del data[-1]
    elif damage == "flip":
        data[-5] ^= 4
    elif damage == "append":
        data.append(0)
    elif damage == "header":
        data[3] ^= 1
    else:
        data.clear()
    path.write_bytes(data)
    assert read(tier, 7) is None
    assert tier.counters.num_corrupt == 1
    assert not path.exists()
    assert tier.write(*block(7))
    assert read(tier, 7) == bytes(block(7)[1])


def test_a_file_of_another_block_is_not_taken_for_this_one(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", 10 * FRAME)
    tier.write(*block(1))
    folder = tmp_path / "model" / "00"
    (folder / block(1)[0].hex()).rename(folder / block(2)[0].hex())
    assert read(tier, 2) is None
    assert tier.counters.num_corrupt == 1


def test_two_processes_share_a_folder_and_its_bound(tmp_path: Path) -> None:
    ours, theirs = (DiskTier(tmp_path, "model", 10 * FRAME) for _ in range(2))
    for number in range(9):
        ours.write(*block(number))
    assert read(theirs, 4) == bytes(block(4)[1])
    reopened = DiskTier(tmp_path, "model", 10 * FRAME)
    assert reopened.num_used_bytes() == 9 * FRAME
    other_model = DiskTier(tmp_path, "other", 10 * FRAME)
    assert read(other_model, 4) is None
    for number in range(20, 30):
        other_model.write(*block(number))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 10 * FRAME


def test_a_folder_that_cannot_be_written_any_more_is_a_counted_failure(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "model", 10 * FRAME)
    (tmp_path / "model" / "00").write_text("in the way")
    assert not tier.write(*block(1))
    assert read(tier, 1) is None
    assert tier.counters.num_failures >= 1


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "tier", "model", 3 * FRAME)
    for number in range(3):
        assert tier.write(*block(number))
    shutil.rmtree(tmp_path / "tier")
    assert tier.contains([block(1)[0]]) == [False]
    # The bound is reached by its own count: it looks what there is.
    for number in range(3, 6):
        assert tier.write(*block(number))
        assert read(tier, number) == bytes(block(number)[1])
    assert tier.num_used_bytes() == 3 * FRAME


def test_a_tier_that_cannot_be_opened_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    config = TierConfig(host_bytes=1 << 20, disk_path=str(tmp_path / "file" / "below"))
    stack = load_tiers(config, "model", host="127.0.0.1", with_host=True)
    assert [tier.name for tier in stack.tiers] == ["host"]
    assert "no disk tier" in caplog.text


def test_a_stack_finds_the_fastest_place_of_every_block_up_to_a_gap(tmp_path: Path) -> None:
    host, disk = make("host", tmp_path, 10), make("disk", tmp_path, 10)
    host.write(*block(1))
    disk.write(*block(1))
    disk.write(*block(2))
    disk.write(*block(4))
    stack = TierStack((host, disk))
    hashes = [block(number)[0] for number in (1, 2, 3, 4)]
    assert stack.locate(hashes) == [host, disk]
    assert stack.missing(hashes[1]) == [host]
    assert stack.missing(hashes[0]) == []


@pytest.mark.parametrize(
    "layout",
    [LAYOUT, replace(LAYOUT, dtype="int8", scale_dtype="float32")],
    ids=lambda layout: layout.dtype,
)
def test_a_block_of_the_cache_goes_out_and_comes_back_in_every_part(layout: KVLayout) -> None:
    memory = KVMemory.allocate(layout, 4)
    for caches in memory.caches:
        for cache in caches:
            cache.copy_(30 * torch.randn(cache.shape))
    buffer = memoryview(bytearray(layout.block_bytes_all_layers))
    gather_block(memory, 1, buffer)
    scatter_block(memory, 3, buffer)
    for caches in memory.caches:
        for cache in caches:
            assert torch.equal(cache[1], cache[3])
            assert not torch.equal(cache[0], cache[1])
    memory.close()


def test_a_reader_beside_a_writer_sees_whole_blocks_only(tmp_path: Path) -> None:
    ours, theirs = (DiskTier(tmp_path, "model", 1000 * FRAME) for _ in range(2))
    writing = threading.Thread(target=lambda: [ours.write(*block(i % 20)) for i in range(400)])
    writing.start()
    while writing.is_alive():
        for number in range(20):
            assert read(theirs, number) in (None, bytes(block(number)[1]))
    assert theirs.counters.num_corrupt == 0
    assert read(theirs, 19) == bytes(block(19)[1])
