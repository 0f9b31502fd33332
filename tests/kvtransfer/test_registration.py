import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kernels.device_queue import nothing_to_wait_for
from kvtransfer.checksum import HashedRun, HashedRuns, sum_checksums
from kvtransfer.config import KVTransferConfig
from kvtransfer.layout import KVLayout
from kvtransfer.registration import DEVICE_ALIGNMENT, KVMemory, RegisteredRegion
from kvtransfer.transports.base import Segment
from kvtransfer.transports.loading import load_transports
from tests.kvtransfer.harness import LAYOUT


def test_caches_are_views_of_the_regions_that_are_announced() -> None:
    memory = KVMemory.allocate(LAYOUT, 5)
    assert [tuple(cache.shape) for cache in memory.k_caches] == [(5, 2, 8, 16)] * 3
    for layer_idx in range(3):
        for part_idx, cache in enumerate((memory.k_caches[layer_idx], memory.v_caches[layer_idx])):
            region = memory.regions[2 * layer_idx + part_idx]
            assert (region.layer_idx, region.part) == (layer_idx, "kv"[part_idx])
            assert region.base_address == cache.data_ptr()
            assert region.num_bytes == cache.numel() * 4 == 5 * region.block_bytes
    spans = sorted((r.base_address, r.base_address + r.num_bytes) for r in memory.regions)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))
    memory.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_every_dtype_has_its_tensor_type(dtype: str) -> None:
    memory = KVMemory.allocate(replace(LAYOUT, dtype=dtype), 2)
    assert str(memory.k_caches[0].dtype) == f"torch.{dtype}"
    assert not memory.v_caches[2].any()
    memory.close()


def test_mla_has_a_latent_and_a_rope_part() -> None:
    layout = KVLayout(
        dtype="float32",
        num_layers=2,
        num_kv_heads=1,
        head_dim=48,
        block_size=4,
        kv_lora_rank=32,
        rope_dim=16,
    )
    memory = KVMemory.allocate(layout, 3)
    assert tuple(memory.k_caches[1].shape) == (3, 1, 4, 32)
    assert tuple(memory.v_caches[1].shape) == (3, 1, 4, 16)
    assert [region.part for region in memory.regions] == ["latent", "rope"] * 2
    assert layout.block_bytes_all_layers == 2 * 4 * (32 + 16) * 4
    memory.close()


def test_address_space_is_not_memory_until_touched() -> None:
    layout = replace(LAYOUT, num_layers=30, head_dim=64, block_size=32)
    memory = KVMemory.allocate(layout, 4096)
    with open("/proc/self/statm", encoding="ascii") as file:
        before = int(file.read().split()[1])
    assert memory.num_bytes > 3_000_000_000
    memory.k_caches[7][100] = 1.0
    with open("/proc/self/statm", encoding="ascii") as file:
        assert int(file.read().split()[1]) - before < 10_000
    memory.close()


def test_close_gives_back_the_descriptor_and_the_mapping() -> None:
    gc.collect()
    num_fds = len(os.listdir("/proc/self/fd"))
    memory = KVMemory.allocate(LAYOUT, 4)
    memory.close()
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == num_fds


def test_a_tensor_outlives_close() -> None:
    gc.collect()
    num_fds = len(os.listdir("/proc/self/fd"))
    memory = KVMemory.allocate(LAYOUT, 4)
    cache = memory.k_caches[0]
    memory.close()
    cache.fill_(3.0)
    assert cache.sum() == 3.0 * cache.numel()
    del cache, memory
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == num_fds


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        KVMemory.allocate(LAYOUT, 0)


def test_layouts_and_regions_survive_the_wire() -> None:
    layout = replace(LAYOUT, tp_rank=1, tp_size=2, total_num_kv_heads=4)
    assert KVLayout.from_proto(layout.to_proto()) == layout
    region = RegisteredRegion(1, 2, "v", 1 << 47, 1 << 33, 4096)
    assert RegisteredRegion.from_proto(region.to_proto()) == region


def layer_sum(memory: KVMemory, layer_idx: int, runs: list[HashedRun], every: int = 1) -> int:
    (checksum,) = HashedRuns([runs]).checksums(memory, layer_idx, every)
    return checksum


def test_checksums_tell_content_place_and_part_apart() -> None:
    memory = KVMemory.allocate(LAYOUT, 8)
    torch.manual_seed(0)
    for cache in memory.k_caches + memory.v_caches:
        cache.copy_(torch.randn(cache.shape))
    slots = 2 * 8  # heads times tokens of a block

    def checksum(layer_idx: int, *blocks: tuple[int, int]) -> int:
        runs = [(block_id * slots, slots, place * slots) for block_id, place in blocks]
        return layer_sum(memory, layer_idx, runs)

    right = checksum(1, (2, 0), (5, 1), (7, 2))
    assert checksum(0, (2, 0), (5, 1), (7, 2)) != right
    assert checksum(1, (5, 0), (2, 1), (7, 2)) != right
    pieces = [checksum(1, block) for block in ((2, 0), (7, 2), (5, 1))]
    assert sum_checksums(pieces) == right
    swapped = memory.k_caches[1][5].clone()
    memory.k_caches[1][5] = memory.v_caches[1][5]
    memory.v_caches[1][5] = swapped
    assert checksum(1, (2, 0), (5, 1), (7, 2)) != right
    memory.close()


def test_a_sample_takes_its_share_of_runs_and_other_ones_in_each_layer() -> None:
    memory = KVMemory.allocate(LAYOUT, 512)
    runs = [(block_id * 16, 16, block_id * 16) for block_id in range(512)]
    clean = [layer_sum(memory, layer_idx, runs, 16) for layer_idx in (0, 1)]
    seen: list[set[int]] = [set(), set()]
    for block_id in range(512):
        for layer_idx in (0, 1):
            memory.k_caches[layer_idx][block_id, 0, 0, 0] = 1.0
            if layer_sum(memory, layer_idx, runs[block_id : block_id + 1], 16) != 0:
                seen[layer_idx].add(block_id)
    assert all(20 <= len(blocks) <= 44 for blocks in seen)
    assert all(0 in blocks for blocks in seen)
    assert seen[0] != seen[1]
    assert [layer_sum(memory, layer_idx, runs, 16) for layer_idx in (0, 1)] != clean
    memory.close()


def test_scales_are_parts_beside_the_values() -> None:
    memory = KVMemory.allocate(replace(LAYOUT, dtype="int8", scale_dtype="float32"), 5)
    assert [region.part for region in memory.regions[:4]] == ["k", "v", "k_scale", "v_scale"]
    assert memory.caches[3][2].shape == (5, 2, 8, 1)
    assert memory.caches[3][2].dtype == torch.float32
    k_caches, v_caches = memory.paged
    k_caches[1].scale[2] = 5.0
    assert torch.equal(memory.caches[2][1][2], torch.full((2, 8, 1), 5.0))
    assert v_caches[1].values.data_ptr() == memory.v_caches[1].data_ptr()
    assert memory.layout.block_bytes_all_layers == 3 * 2 * (2 * 8 * 16 + 2 * 8 * 4)
    memory.close()


def test_memory_of_a_device_is_aligned_for_its_transport() -> None:
    # The host's own device: what is checked is arithmetic on addresses.
    memory = KVMemory.on_device(
        LAYOUT, 5, torch.device("cpu"), lambda: None, lambda: nothing_to_wait_for
    )
    assert memory.fd is None
    for region, caches in zip(memory.regions[::2], memory.k_caches, strict=True):
        assert region.base_address == caches.data_ptr()
    for region in memory.regions:
        assert region.base_address % DEVICE_ALIGNMENT == 0
        assert memory.base_address <= region.base_address
        assert region.base_address + region.num_bytes <= memory.base_address + memory.num_bytes
    assert memory.num_bytes % DEVICE_ALIGNMENT == 0
    assert not memory.k_caches[2].any()
    memory.close()
    assert memory.k_caches == []


def test_a_thread_that_writes_takes_the_device_of_the_memory_first() -> None:
    memory = KVMemory.allocate(LAYOUT, 5)
    threads: list[int] = []
    memory.bind_thread = lambda: threads.append(threading.get_ident())
    transports = load_transports(KVTransferConfig(transport="mooncake"), memory)
    transport = transports.named("mooncake")
    connection = transport.connect(transport.endpoint(), time.monotonic() + 10)
    memory.k_caches[0][0] = 3.0
    source, target = memory.regions[0].base_address, memory.regions[2].base_address
    segment = Segment(source, target, memory.regions[0].block_bytes)
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(threading.get_ident).result()
        deadline_s = time.monotonic() + 10
        pool.submit(connection.write, [segment], lambda: deadline_s, lambda: None).result()
    assert threads == [writer]
    assert torch.equal(memory.k_caches[1][0], memory.k_caches[0][0])
    connection.close()
    transports.close()
    memory.close()
