"""Paged attention of the C++ backend against the reference, on caches poisoned with NaN.

float32 tolerance 1e-5: outputs are averages of values of order 1, so they round by a few 1e-7; the
exponential is good to 20 ulp (2e-6) and scores of order 10 carry up to 1e-6 into it.
"""

import subprocess
import sys

import pytest
import torch

from kernels.ops import Ops
from tests.kernels.int8 import with_int8_cache
from tests.kernels.paged import (
    COMMON_PREFIXES,
    MIXED,
    RELATED,
    PagedBatch,
    make_batch,
    with_common_prefixes,
)
from tests.kernels.threads import COUNTS, computing_with
from tests.kernels.tolerance import ATTENTION_TOLERANCE


def num_items() -> int:
    """Of the last attention of this thread."""
    return int(torch.ops.pdserve_cpu.last_attention()[0])


def num_workspace_floats() -> int:
    return int(torch.ops.pdserve_cpu.last_attention()[1])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(9, 3), (8, 1), (4, 4), (3, 1), (16, 2), (1, 1), (60, 1)]
)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_attention_equals_the_reference_for_head_groups(
    cpu: Ops, reference: Ops, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    batch = make_batch(
        MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=32
    )
    assert (batch.attend(cpu) - batch.attend(reference)).abs().max() < ATTENTION_TOLERANCE


@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 128, 256])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 72, 96, 128])
def test_attention_equals_the_reference_for_block_and_head_sizes(
    cpu: Ops, reference: Ops, block_size: int, head_dim: int
) -> None:
    batch = make_batch(MIXED, num_heads=6, num_kv_heads=2, head_dim=head_dim, block_size=block_size)
    assert (batch.attend(cpu) - batch.attend(reference)).abs().max() < ATTENTION_TOLERANCE


@pytest.mark.parametrize("window", [1, 7, 64, 129, 2000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (16, 1)])
def test_attention_equals_the_reference_for_windows(
    cpu: Ops, reference: Ops, num_heads: int, num_kv_heads: int, window: int
) -> None:
    batch = make_batch(
        MIXED,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=32,
        block_size=16,
        window=window,
    )
    assert (batch.attend(cpu) - batch.attend(reference)).abs().max() < ATTENTION_TOLERANCE


@pytest.mark.parametrize("window", [1, 5, 40])
def test_a_window_hides_all_but_the_last_keys(reference: Ops, window: int) -> None:
    batch = make_batch(
        [(70, 100)], num_heads=2, num_kv_heads=1, head_dim=16, block_size=8, window=window
    )
    out = batch.attend(reference)
    blocks = batch.block_table[0, :13].long()
    keys = batch.k_cache[blocks].flatten(0, 2)[:100]
    values = batch.v_cache[blocks].flatten(0, 2)[:100]
    for row in range(70):
        seen = slice(max(0, 31 + row - window), 31 + row)
        weights = (batch.scale * batch.q[row] @ keys[seen].T).softmax(-1)
        torch.testing.assert_close(out[row], weights @ values[seen], rtol=0, atol=1e-5)


def _decode_alone(batch: PagedBatch, seq: int, cpu: Ops) -> torch.Tensor:
    return batch.only(seq, 1, int(batch.context_lens[seq])).attend(cpu)[0]


@pytest.mark.parametrize("threads", COUNTS)
def test_a_row_has_the_same_bits_alone_chunked_and_batched(cpu: Ops, threads: int) -> None:
    batch = make_batch(MIXED, num_heads=9, num_kv_heads=3, head_dim=64, block_size=32)
    together = batch.attend(cpu)
    with computing_with(threads):
        for seq in range(len(MIXED)):
            last = int(batch.cu_seqlens_q[seq + 1]) - 1
            assert torch.equal(_decode_alone(batch, seq, cpu), together[last])
        chunks = [batch.only(2, 64, 64), batch.only(2, 7, 71), batch.only(2, 229, 300)]
        chunked = torch.cat([chunk.attend(cpu) for chunk in chunks])
    assert torch.equal(chunked, together[2:302])


def _assert_shared_blocks_change_no_bit(cpu: Ops, batch: PagedBatch, is_int8: bool = False) -> None:
    shared, own = with_common_prefixes(batch, COMMON_PREFIXES)
    if is_int8:
        shared, own = with_int8_cache(shared), with_int8_cache(own)
    assert not torch.equal(shared.block_table, own.block_table)
    assert torch.equal(shared.attend(cpu), own.attend(cpu))


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("block_size", [1, 5, 16, 32, 128, 256])
@pytest.mark.parametrize("threads", COUNTS)
def test_sequences_that_share_blocks_have_the_bits_of_those_with_their_own(
    cpu: Ops, block_size: int, threads: int, is_int8: bool
) -> None:
    batch = make_batch(RELATED, num_heads=9, num_kv_heads=3, head_dim=64, block_size=block_size)
    with computing_with(threads):
        _assert_shared_blocks_change_no_bit(cpu, batch, is_int8)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(4, 4, 16), (8, 1, 40), (16, 2, 72), (60, 1, 80), (32, 1, 128), (1, 1, 96)],
)
@pytest.mark.parametrize("is_int8", [False, True])
def test_shared_blocks_change_no_bit_for_any_heads(
    cpu: Ops, num_heads: int, num_kv_heads: int, head_dim: int, is_int8: bool
) -> None:
    batch = make_batch(
        RELATED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16
    )
    _assert_shared_blocks_change_no_bit(cpu, batch, is_int8)


@pytest.mark.parametrize("window", [1, 129, 300, 512, 899, 2000])
def test_shared_blocks_change_no_bit_with_windows(cpu: Ops, window: int) -> None:
    batch = make_batch(
        RELATED, num_heads=9, num_kv_heads=3, head_dim=32, block_size=16, window=window
    )
    _assert_shared_blocks_change_no_bit(cpu, batch)


@pytest.mark.parametrize("threads", COUNTS)
def test_a_prefix_of_very_many_rows_changes_no_bit(cpu: Ops, threads: int) -> None:
    counts = [1 + seq % 5 for seq in range(90)]
    batch = make_batch(
        [(queries, 260 + queries + 3 * seq) for seq, queries in enumerate(counts)],
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        block_size=16,
    )
    shared, own = with_common_prefixes(batch, [(seq, 0, 256) for seq in range(1, 90)])
    with computing_with(threads):
        assert torch.equal(shared.attend(cpu), own.attend(cpu))


def test_what_sequences_share_is_computed_once(cpu: Ops) -> None:
    sequences = [(1, 300), (1, 400), (2, 390), (1, 130)]
    batch = make_batch(sequences, num_heads=6, num_kv_heads=2, head_dim=16, block_size=16)
    # Two tiles of the first three, one of all four.
    shared, own = with_common_prefixes(batch, [(1, 0, 256), (2, 0, 256), (3, 0, 128)])
    with computing_with(1):
        own.attend(cpu)
        assert num_items() == 2 * (3 + 4 + 4 + 2)
        shared.attend(cpu)
        assert num_items() == 2 * (1 + 1 + 1 + 2 + 2 + 1)


def test_what_many_sequences_took_goes_back_with_few(cpu: Ops) -> None:
    few = make_batch([(1, 300)], num_heads=1, num_kv_heads=1, head_dim=16, block_size=16)
    many = make_batch([(8, 1000)] * 64, num_heads=64, num_kv_heads=1, head_dim=16, block_size=16)
    alone = few.attend(cpu)
    many.attend(cpu)
    assert num_workspace_floats() == 64 * 8 * 64 * 8 * (16 + 2)
    assert torch.equal(few.attend(cpu), alone)
    assert num_workspace_floats() == 3 * (16 + 2)
    many.attend(cpu)
    assert torch.equal(few.attend(cpu), alone)


OUT_OF_MEMORY = """
import resource, sys
from pathlib import Path
import pytest, torch
from kernels.ops import select_ops
from tests.kernels.paged import make_batch

cpu = select_ops("cpu")
shape = {"num_heads": 64, "num_kv_heads": 1, "head_dim": 256, "block_size": 16}
few = make_batch([(1, 300)], **shape)
alone = few.attend(cpu)
many = make_batch([(8, 1000)] * 200, **shape)
num_bytes = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (num_bytes + (500 << 20), resource.RLIM_INFINITY))
with pytest.raises(MemoryError):
    many.attend(cpu)
assert torch.equal(few.attend(cpu), alone)
"""


def test_attention_works_again_after_memory_ran_out(cpu: Ops) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_sequence_without_queries_has_no_rows(cpu: Ops, reference: Ops) -> None:
    batch = make_batch(
        [(1, 20), (0, 40), (3, 30)], num_heads=4, num_kv_heads=2, head_dim=16, block_size=8
    )
    torch.testing.assert_close(
        batch.attend(cpu), batch.attend(reference), atol=ATTENTION_TOLERANCE, rtol=0
    )


def test_a_sequence_without_keys_gives_zeros(cpu: Ops) -> None:
    batch = make_batch([(1, 0), (1, 3)], num_heads=2, num_kv_heads=1, head_dim=16, block_size=4)
    out = batch.attend(cpu)
    assert torch.equal(out[0], torch.zeros(2, 16))
    assert out[1].isfinite().all()
    assert torch.equal(batch.only(0, 1, 0).attend(cpu), out[:1])


def test_large_scores_do_not_overflow(cpu: Ops, reference: Ops) -> None:
    batch = make_batch([(3, 300)], num_heads=2, num_kv_heads=1, head_dim=32, block_size=16)
    batch.k_cache.mul_(300)
    # Scores near 1000 are exact to 6e-5 only, and exp turns that into a relative error.
    assert (batch.attend(cpu) - batch.attend(reference)).abs().max() < 1e-2


def test_a_block_id_outside_the_cache_is_refused(cpu: Ops) -> None:
    batch = make_batch([(1, 40)], num_heads=2, num_kv_heads=1, head_dim=16, block_size=16)
    batch.block_table[0, 1] = batch.k_cache.shape[0]
    with pytest.raises(IndexError, match=r"block id 6 of sequence 0 is not in \[0, 6\)"):
        batch.attend(cpu)


def test_another_dtype_is_refused(cpu: Ops) -> None:
    with pytest.raises(RuntimeError, match="must be float32 on the CPU"):
        cpu.rms_norm(torch.ones(2, 8, dtype=torch.float16), torch.ones(8), 1e-5)
