import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch, BatchBuilder
from engine.scheduler_output import ScheduledRequest
from tests.engine.tiny import make_request

BLOCK_SIZE = 4


@st.composite
def scheduled_requests(draw: st.DrawFn) -> ScheduledRequest:
    token_ids = draw(st.lists(st.integers(0, 999), min_size=1, max_size=30))
    request = make_request(token_ids)
    request.num_computed_tokens = draw(st.integers(0, len(token_ids) - 1))
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    spare = draw(st.integers(0, 2))
    request.block_ids = draw(
        st.lists(
            st.integers(0, 99),
            min_size=num_blocks + spare,
            max_size=num_blocks + spare,
            unique=True,
        )
    )
    num_tokens = draw(st.integers(1, len(token_ids) - request.num_computed_tokens))
    return ScheduledRequest(request, num_tokens)


@given(st.lists(st.lists(scheduled_requests(), min_size=1, max_size=9), min_size=1, max_size=3))
def test_a_batch_is_what_a_loop_over_its_tokens_gives(steps: list[list[ScheduledRequest]]) -> None:
    builder = BatchBuilder([], [], BLOCK_SIZE)  # one for all steps: its buffers are used again
    for scheduled in steps:
        input_ids, positions, slots, starts, contexts, samples = [], [], [], [0], [], []
        for entry in scheduled:
            request = entry.request
            for position in range(
                request.num_computed_tokens, request.num_computed_tokens + entry.num_tokens
            ):
                input_ids.append(request.token_ids[position])
                positions.append(position)
                block_id = request.block_ids[position // BLOCK_SIZE]
                slots.append(block_id * BLOCK_SIZE + position % BLOCK_SIZE)
            starts.append(len(input_ids))
            contexts.append(positions[-1] + 1)
            if entry.samples:
                samples.append(len(input_ids) - 1)
        batch = builder.build(scheduled)
        assert batch.input_ids.tolist() == input_ids
        assert batch.positions.tolist() == positions
        assert batch.kv.slot_mapping.tolist() == slots
        assert batch.kv.cu_seqlens_q.tolist() == starts
        assert batch.kv.context_lens.tolist() == contexts
        assert batch.kv.max_seqlen_q == max(entry.num_tokens for entry in scheduled)
        assert batch.sample_rows.tolist() == samples
        assert batch.kv.block_table.is_contiguous()
        for row, entry, context in zip(
            batch.kv.block_table.tolist(), scheduled, contexts, strict=True
        ):
            used = -(-context // BLOCK_SIZE)
            assert row[:used] == entry.request.block_ids[:used]
        tensors = (batch.input_ids, batch.positions, batch.kv.slot_mapping, batch.kv.block_table)
        assert all(tensor.dtype == torch.int32 for tensor in tensors)


def test_buffers_grow_with_the_batch() -> None:
    builder = BatchBuilder([], [], BLOCK_SIZE)
    requests = [make_request(range(100)) for _ in range(200)]
    for request in requests:
        request.block_ids = list(range(25))
    batch = builder.build([ScheduledRequest(request, 100) for request in requests])
    assert batch.input_ids.tolist() == list(range(100)) * 200
    assert batch.kv.block_table[:, :25].tolist() == [list(range(25))] * 200
    assert len(batch.sample_rows) == 200


def addresses(batch: Batch) -> list[int]:
    kv = batch.kv
    tensors = (
        batch.input_ids,
        batch.positions,
        batch.sample_rows,
        kv.slot_mapping,
        kv.block_table,
        kv.cu_seqlens_q,
        kv.context_lens,
    )
    return [tensor.data_ptr() for tensor in tensors]


def test_every_step_lies_where_the_one_before_it_lay() -> None:
    builder = BatchBuilder([], [], BLOCK_SIZE)
    requests = [make_request(range(40)) for _ in range(8)]
    for i, request in enumerate(requests):
        request.block_ids = list(range(10 * i, 10 * i + 10))
    batches = [builder.build([ScheduledRequest(request, 9) for request in requests])]
    first = addresses(batches[0])
    assert len(set(first)) == len(first)
    for step in range(20):
        running = requests[: 1 + step % 8]  # sequences come and go
        for request in running:
            request.num_computed_tokens += 1
        batch = builder.build([ScheduledRequest(request, 1) for request in running])
        batches.append(batch)  # NOTE: held, or another tensor might get the same memory
        assert addresses(batch) == first
        assert batch.positions.tolist() == [request.num_computed_tokens for request in running]
