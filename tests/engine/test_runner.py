import copy
from pathlib import Path

import pytest
import torch

from engine.runner import Runner
from engine.scheduler_output import ScheduledRequest
from kernels.ops import Ops
from tests.engine.tiny import (
    PoisonedCache,
    from_hf,
    hf_logits,
    make_request,
    random_token_ids,
    tiny_hf_llama,
)

NUM_LAYERS = 3


@pytest.fixture
def setup(ops: Ops, tmp_path: Path):
    hf = tiny_hf_llama(num_hidden_layers=NUM_LAYERS)
    model = from_hf(hf, tmp_path, ops)
    cache = PoisonedCache(model, num_blocks=64, block_size=8)
    return hf, cache, Runner(model, cache.k_caches, cache.v_caches, ops, cache.block_size)


def test_there_is_a_row_of_logits_per_request_that_reaches_its_last_token(setup) -> None:
    hf, cache, runner = setup
    lengths, counts = (5, 20, 9, 1), (5, 12, 9, 1)
    requests = [make_request(random_token_ids(length, length)) for length in lengths]
    for request in requests:
        cache.allocate(request)
    scheduled = [ScheduledRequest(r, n) for r, n in zip(requests, counts, strict=True)]
    output = runner.run(scheduled)
    expected = [hf_logits(hf, requests[i].token_ids)[-1] for i in (0, 2, 3)]
    assert output.logits.dtype == torch.float32
    torch.testing.assert_close(output.logits, torch.stack(expected), rtol=0, atol=1e-3)


def test_a_step_of_which_no_request_samples_gives_no_logits(setup) -> None:
    _, cache, runner = setup
    request = make_request(random_token_ids(20, 0))
    cache.allocate(request)
    assert runner.run([ScheduledRequest(request, 12)]).logits.shape == (0, 96)


def test_requests_are_not_changed(setup) -> None:
    _, cache, runner = setup
    request = make_request(random_token_ids(20, 0), num_prompt_logprobs=1)
    cache.allocate(request)
    before = copy.deepcopy([getattr(request, name) for name in request.__slots__])
    runner.run([ScheduledRequest(request, 20)])
    assert [getattr(request, name) for name in request.__slots__] == before


def test_on_layer_is_called_once_the_layers_kv_is_written_and_before_the_next(setup) -> None:
    _, cache, runner = setup
    request = make_request(random_token_ids(20, 0))
    cache.allocate(request)
    seen: list[tuple[int, list[bool]]] = []

    def is_written(layer_idx: int) -> bool:
        blocks = request.block_ids[:2]  # the full ones
        caches = (cache.k_caches[layer_idx][blocks], cache.v_caches[layer_idx][blocks])
        return not any(bool(part.isnan().any()) for part in caches)

    def on_layer(layer_idx: int) -> None:
        seen.append((layer_idx, [is_written(i) for i in range(NUM_LAYERS)]))

    runner.run([ScheduledRequest(request, 20)], on_layer)
    assert seen == [
        (0, [True, False, False]),
        (1, [True, True, False]),
        (2, [True, True, True]),
    ]


@pytest.mark.parametrize("chunk", [150, 70, 8])
def test_prompt_logprobs_are_those_of_transformers_however_the_prompt_is_chunked(
    setup, chunk: int
) -> None:
    hf, cache, runner = setup
    token_ids = random_token_ids(150, 0)
    request = make_request(token_ids, num_prompt_logprobs=3)
    other = make_request(random_token_ids(200, 1))
    cache.allocate(request)
    cache.allocate(other)
    entries = {}
    while request.num_computed_tokens < 150:
        count = min(chunk, 150 - request.num_computed_tokens)
        output = runner.run([ScheduledRequest(other, 3), ScheduledRequest(request, count)])
        for part in output.prompt_logprobs:
            assert part.request is request
            entries.update({part.start + i: entry for i, entry in enumerate(part.entries)})
        request.num_computed_tokens += count
        other.num_computed_tokens += 3
    assert sorted(entries) == list(range(1, 150))
    expected = hf_logits(hf, token_ids).log_softmax(dim=-1)
    for index, entry in entries.items():
        assert entry.token_id == token_ids[index]
        assert entry.logprob == pytest.approx(float(expected[index - 1, entry.token_id]), abs=1e-3)
        top = expected[index - 1].topk(3).values.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(top, abs=1e-3)


def test_output_tokens_of_a_migrated_request_get_no_prompt_logprobs(setup) -> None:
    _, cache, runner = setup
    request = make_request(random_token_ids(20, 0), num_prompt_logprobs=0)
    request.num_prompt_tokens = 12
    cache.allocate(request)
    (part,) = runner.run([ScheduledRequest(request, 20)]).prompt_logprobs
    assert (part.start, len(part.entries)) == (1, 11)
