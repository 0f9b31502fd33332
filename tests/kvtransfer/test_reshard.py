from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout import DTYPE_BYTES, KVLayout
from kvtransfer.reshard import ReshardPlan, plan_transfer
from tests.kvtransfer.sharded import held_heads


def rank_layout(base: KVLayout, tp_rank: int, tp_size: int) -> KVLayout:
    heads = 1 if base.kv_lora_rank else max(1, base.num_model_heads // tp_size)
    return replace(base, tp_rank=tp_rank, tp_size=tp_size, num_kv_heads=heads)


def fill(layout: KVLayout, blocks: list[int], num_blocks: int, model: torch.Tensor) -> torch.Tensor:
    """Part memory [num_blocks, heads, block_size, width] holding model [heads, tokens, width]."""
    heads = held_heads(layout)
    memory = torch.full(
        (num_blocks, len(heads), layout.block_size, model.shape[2]), -1, dtype=torch.int64
    )
    for token in range(model.shape[1]):
        index = token // layout.block_size
        if index < len(blocks):
            memory[blocks[index], :, token % layout.block_size] = model[heads, token]
    return memory


def apply(
    plan: ReshardPlan, part_idx: int, source: torch.Tensor, target: torch.Tensor, item_bytes: int
) -> torch.Tensor:
    """Copy, and count how often each element of the target was written."""
    count = torch.zeros(target.numel(), dtype=torch.int64)
    flat_source, flat_target = source.view(-1), target.view(-1)
    for source_offset, target_offset, num_bytes in plan.moves[part_idx]:
        for value in (source_offset, target_offset, num_bytes):
            assert value % item_bytes == 0
        s, t, n = source_offset // item_bytes, target_offset // item_bytes, num_bytes // item_bytes
        assert 0 <= s <= s + n <= flat_source.numel()
        assert 0 <= t <= t + n <= flat_target.numel()
        flat_target[t : t + n] = flat_source[s : s + n]
        count[t : t + n] += 1
    return count.view(target.shape)


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVLayout, int, int, int, int, int, list[int], list[int]]:
    mla = draw(st.booleans())
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    base = KVLayout(
        dtype=dtype,
        scale_dtype="float32" if dtype == "int8" else "",
        num_layers=1,
        num_kv_heads=1,
        head_dim=draw(st.integers(1, 3)),
        block_size=1,
        total_num_kv_heads=1 if mla else draw(st.sampled_from([1, 2, 4, 8])),
        kv_lora_rank=draw(st.integers(1, 4)) if mla else 0,
        rope_dim=draw(st.integers(1, 3)) if mla else 0,
    )
    source_size, target_size = draw(st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 2))
    source_block, target_block = draw(st.tuples(*[st.sampled_from([1, 2, 3, 4, 8])] * 2))
    num_tokens = draw(st.integers(0, 20))
    source_blocks = draw(st.permutations(range(24)))[: -(-num_tokens // source_block)]
    target_blocks = draw(st.permutations(range(24)))[: -(-num_tokens // target_block)]
    return (
        base,
        source_size,
        target_size,
        source_block,
        target_block,
        num_tokens,
        list(source_blocks),
        list(target_blocks),
    )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_byte_of_a_target_rank_is_written_once_with_what_it_would_have_computed(
    case: tuple[KVLayout, int, int, int, int, int, list[int], list[int]],
) -> None:
    base, source_size, target_size, source_bs, target_bs, num_tokens, s_blocks, t_blocks = case
    for part_idx, part in enumerate(base.parts):
        item_bytes = DTYPE_BYTES[part.dtype]
        shape = (base.num_model_heads, num_tokens, part.width)
        model = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
        for target_rank in range(target_size):
            target = rank_layout(replace(base, block_size=target_bs), target_rank, target_size)
            expected = fill(target, t_blocks, 24, model)
            got = torch.full_like(expected, -1)
            count = torch.zeros_like(expected)
            for source_rank in range(source_size):
                source = rank_layout(replace(base, block_size=source_bs), source_rank, source_size)
                memory = fill(source, s_blocks, 24, model)
                plan = plan_transfer(source, target, s_blocks, t_blocks, num_tokens)
                count += apply(plan, part_idx, memory, got, item_bytes)
            assert torch.equal(got, expected)
            assert torch.equal(count, (expected >= 0).long())


LAYOUT = KVLayout(dtype="float32", num_layers=2, num_kv_heads=3, head_dim=4, block_size=8)


def test_runs_of_neighbouring_blocks_become_one_move() -> None:
    plan = plan_transfer(LAYOUT, LAYOUT, [4, 5, 6, 9], [1, 2, 3, 4])
    size = LAYOUT.block_bytes
    assert plan.moves[0] == ((4 * size, 1 * size, 3 * size), (9 * size, 4 * size, size))
    assert plan.moves[0] == plan.moves[1]
    assert plan.num_bytes == 2 * 4 * size


def test_moves_are_joined_whatever_the_order_of_the_blocks() -> None:
    plan = plan_transfer(LAYOUT, LAYOUT, [6, 4, 5], [3, 1, 2])
    assert len(plan.moves[0]) == 1


def test_a_target_block_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        plan_transfer(LAYOUT, LAYOUT, [1, 2], [3, 3])


def test_too_few_blocks_for_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens is 17, the blocks hold 16"):
        plan_transfer(LAYOUT, LAYOUT, [1, 2], [3, 4], 17)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int8"),
        ("num_layers", 3),
        ("head_dim", 8),
        ("rope_dim", 4),
        ("weights", "int8"),
    ],
)
def test_layouts_of_different_models_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        plan_transfer(LAYOUT, replace(LAYOUT, **{field: value}), [1], [2])


def test_unlike_dtypes_are_refused_with_both() -> None:
    int8 = replace(LAYOUT, dtype="int8", scale_dtype="float32")
    with pytest.raises(ValueError, match="dtype differs: writer float32, reader int8"):
        plan_transfer(LAYOUT, int8, [1], [2])


def test_more_ranks_than_heads_must_divide() -> None:
    layout = replace(LAYOUT, num_kv_heads=1, total_num_kv_heads=3, tp_size=4)
    with pytest.raises(ValueError, match="not a multiple"):
        plan_transfer(layout, replace(layout, tp_rank=1), [1], [2])
