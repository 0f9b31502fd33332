"""Sampling: every option against a slow row-by-row reference, and purity in (seed, position)."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.draw import uniforms
from engine.logprobs import top_logprobs
from engine.request import Request, SamplingParams
from engine.sampling import Sampler, SamplerOutput
from kernels.ops import Ops, select_ops

EOS = frozenset({3})


def make_request(prompt=(1, 2), output=(), **params) -> Request:
    token_ids = [*prompt, *output]
    return Request("r", 0, token_ids, len(prompt), SamplingParams(**params))


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request) -> Ops:
    return select_ops(request.param)


@pytest.fixture(scope="module")
def sample(ops):
    def sample_once(logits: torch.Tensor, requests: list[Request]) -> SamplerOutput:
        return Sampler(logits.shape[1], EOS, ops).sample(logits, requests)

    return sample_once


def random_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def reference_uniform(seed: int, position: int) -> float:
    mask, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    key = mix((seed + gamma) & mask)
    return (mix((key + (position + 1) * gamma) & mask) >> 11) / 2**53


def reference_adjust(logits: np.ndarray, request: Request) -> np.ndarray:
    """Bias, penalties and min_tokens, token by token."""
    params, adjusted = request.sampling, logits.astype(np.float64)
    output = request.token_ids[request.num_prompt_tokens :]
    for token_id, bias in params.logit_bias.items():
        if token_id < len(adjusted):
            adjusted[token_id] += bias
    for token_id in set(request.token_ids):
        if adjusted[token_id] > 0:
            adjusted[token_id] /= params.repetition_penalty
        else:
            adjusted[token_id] *= params.repetition_penalty
    for token_id, count in Counter(output).items():
        adjusted[token_id] -= params.frequency_penalty * count + params.presence_penalty
    if len(output) < params.min_tokens:
        for token_id in params.stop_token_ids | (frozenset() if params.ignore_eos else EOS):
            adjusted[token_id] = -math.inf
    return adjusted


def reference_distribution(logits: np.ndarray, request: Request) -> np.ndarray:
    """Probability of each token; the logits should have no ties."""
    params, adjusted = request.sampling, reference_adjust(logits, request)
    if params.temperature == 0:
        return np.eye(len(adjusted))[int(np.argmax(adjusted))]
    scaled = adjusted / params.temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < params.min_p] = 0.0
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0.0
    weights /= weights.sum()
    if params.top_p < 1.0:
        before = np.cumsum(weights[order]) - weights[order]
        first_out = max(int(np.sum(before < params.top_p)), 1)
        weights[order[first_out:]] = 0.0
    return weights / weights.sum()


def reference_sample(logits: np.ndarray, request: Request) -> int:
    cumulative = np.cumsum(reference_distribution(logits, request))
    u = reference_uniform(request.sampling.seed, request.num_tokens)
    return min(int(np.searchsorted(cumulative, u * cumulative[-1], side="right")), len(logits) - 1)


def all_params(vocab_size: int) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries(
        {"seed": st.integers(0, 2**64 - 1)},
        optional={
            "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.8]),
            "top_k": st.integers(0, vocab_size + 3),
            "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
            "min_p": st.sampled_from([0.0, 0.02, 0.3]),
            "presence_penalty": st.sampled_from([-1.0, 0.0, 0.6]),
            "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.4]),
            "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3]),
            "logit_bias": st.dictionaries(
                st.integers(0, vocab_size + 5), st.sampled_from([-100.0, -1.5, 2.5, 100.0])
            ),
            "min_tokens": st.integers(0, 4),
            "stop_token_ids": st.frozensets(st.integers(0, 8), max_size=2),
            "ignore_eos": st.booleans(),
            "num_logprobs": st.sampled_from([None, 0, 3]),
        },
    )


def assert_is_reference(chosen: int, logits: np.ndarray, request: Request) -> None:
    """The reference's token, or its neighbour where the number is on their border."""
    wanted = reference_sample(logits, request)
    if chosen == wanted:
        return
    weights = reference_distribution(logits, request)
    low, high = sorted((chosen, wanted))
    border = weights[: low + 1].sum()
    u = reference_uniform(request.sampling.seed, request.num_tokens)
    assert weights[chosen] > 0, f"{chosen} was removed from the distribution, wanted {wanted}"
    assert abs(border - u) < 1e-5, f"{chosen} instead of {wanted}, u {u}, border {border}"
    assert weights[low + 1 : high].sum() < 1e-5


@settings(deadline=None, max_examples=250)
@given(data=st.data(), vocab_size=st.sampled_from([12, 130, 400]))
def test_any_mix_of_options_draws_the_reference_tokens(sample, data, vocab_size):
    num_rows = data.draw(st.integers(1, 6))
    logits = random_logits(num_rows, vocab_size, data.draw(st.integers(0, 1000)))
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=6)
    requests = [
        make_request(
            data.draw(tokens.filter(len)), data.draw(tokens), **data.draw(all_params(vocab_size))
        )
        for _ in range(num_rows)
    ]
    before = logits.clone()
    output = sample(logits, requests)
    assert torch.equal(logits, before)
    for row, request in enumerate(requests):
        assert_is_reference(output.token_ids[row], logits[row].numpy(), request)
        assert (output.logprobs[row] is None) == (request.sampling.num_logprobs is None)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_a_row_draws_the_same_token_in_any_batch(sample, data):
    vocab_size = 700
    logits = random_logits(6, vocab_size, data.draw(st.integers(0, 1000)))
    requests = [make_request(**data.draw(all_params(vocab_size))) for _ in range(6)]
    together = sample(logits, requests).token_ids
    order = data.draw(st.permutations(range(6)))
    moved = sample(logits[list(order)], [requests[row] for row in order]).token_ids
    assert moved == [together[row] for row in order]
    alone = [sample(logits[row : row + 1], [requests[row]]).token_ids[0] for row in range(6)]
    assert alone == together


def test_greedy_is_the_argmax(sample):
    logits = random_logits(5, 50)
    assert sample(logits, [make_request() for _ in range(5)]).token_ids == logits.argmax(1).tolist()


def test_a_temperature_of_almost_zero_is_the_argmax(sample):
    logits = random_logits(2, 50)
    requests = [make_request(temperature=t, top_p=0.9) for t in (1e-6, 1e-38)]
    assert sample(logits, requests).token_ids == logits.argmax(1).tolist()


def test_an_empty_batch_gives_nothing(sample):
    assert sample(torch.empty(0, 8), []) == SamplerOutput([], [])


def test_logits_of_another_shape_are_refused(sample):
    with pytest.raises(ValueError, match=r"logits are \[1, 8\], expected \[2, 8\]"):
        sample(torch.zeros(1, 8), [make_request(), make_request()])


def test_the_random_number_is_a_pure_function_of_seed_and_position():
    seeds = np.array([0, 1, 42, 2**63, 2**64 - 1], np.uint64)
    positions = np.array([0, 7, 7, 10_000, 2**31], np.uint64)
    wanted = [reference_uniform(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    assert uniforms(seeds, positions).tolist() == wanted
    assert uniforms(seeds[2:3], positions[2:3]).tolist() == wanted[2:3]


def test_random_numbers_are_even_over_positions_and_over_seeds():
    count = 20_000
    grid = np.arange(count, dtype=np.uint64)
    for numbers in (uniforms(grid, grid * 0 + 5), uniforms(grid * 0 + 5, grid)):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        observed, _ = np.histogram(numbers, bins=50, range=(0, 1))
        # Chi-square with 49 degrees of freedom: 1e-4 quantile.
        assert ((observed - count / 50) ** 2 / (count / 50)).sum() < 97.0
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 4},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1, "top_k": 6, "top_p": 0.95},
    ],
)
def test_draws_follow_the_distribution(sample, params):
    count, vocab_size = 8000, 10
    row = random_logits(1, vocab_size, seed=4, scale=1.5)
    requests = [make_request(seed=seed, **params) for seed in range(count)]
    drawn = sample(row.expand(count, -1).contiguous(), requests).token_ids
    expected = reference_distribution(row[0].numpy(), requests[0]) * count
    observed = np.bincount(drawn, minlength=vocab_size)
    assert (observed[expected == 0] == 0).all()
    kept = expected > 0
    # Chi-square with at most 9 degrees of freedom: 1e-4 quantile is 33.7.
    assert ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum() < 33.7


def test_another_position_draws_another_number(sample):
    logits = torch.zeros(1, 1000)
    drawn = {
        sample(logits, [make_request(prompt=[1] * n, temperature=1.0, seed=9)]).token_ids[0]
        for n in range(1, 40)
    }
    assert len(drawn) > 30


def test_a_flat_nucleus_wider_than_the_candidates_is_exact(sample):
    vocab_size = 6000
    logits = random_logits(3, vocab_size, seed=1, scale=0.4)
    for top_p in (0.3, 0.9, 0.999):
        requests = [make_request(temperature=1.0, top_p=top_p, seed=seed) for seed in range(3)]
        for row, token_id in enumerate(sample(logits, requests).token_ids):
            assert_is_reference(token_id, logits[row].numpy(), requests[row])


def test_equal_logits_at_the_cut_are_all_kept(sample):
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    requests = [make_request(temperature=1.0, top_k=2, seed=seed) for seed in range(300)]
    drawn = sample(logits.expand(300, -1).contiguous(), requests).token_ids
    assert set(drawn) == {0, 1, 2, 3}


def test_a_token_without_probability_is_never_drawn(sample):
    logits = torch.full((400, 300), -math.inf)
    logits[:, 7] = 1.0
    logits[:, 250] = 0.0
    requests = [make_request(temperature=1.0, seed=seed) for seed in range(400)]
    assert set(sample(logits, requests).token_ids) == {7, 250}


def test_a_row_in_which_everything_is_banned_still_gives_a_token(sample):
    logits = torch.full((2, 300), -math.inf)
    requests = [make_request(temperature=1.0, top_p=0.5), make_request()]
    assert all(0 <= token_id < 300 for token_id in sample(logits, requests).token_ids)


def test_min_tokens_bans_what_would_end_the_request_until_it_is_reached(sample, ops):
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0, 8.0]])
    request = make_request(min_tokens=2, stop_token_ids=frozenset({4, 77}))
    sampler = Sampler(5, EOS, ops)
    for _ in range(2):
        assert sampler.sample(logits, [request]).token_ids == [2]
        request.token_ids.append(2)
    assert sampler.sample(logits, [request]).token_ids == [3]
    ignoring = make_request(min_tokens=2, ignore_eos=True)
    assert sample(logits, [ignoring]).token_ids == [3]


def test_logit_bias_forces_and_bans(sample):
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(2, -1).contiguous()
    requests = [make_request(logit_bias={0: 100.0, 999: 100.0}), make_request(logit_bias={2: -100})]
    assert sample(logits, requests).token_ids == [0, 1]


def test_penalties_keep_up_with_a_request_over_steps_and_changing_batches(ops):
    vocab_size = 40
    sampler = Sampler(vocab_size, EOS, ops)
    params = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.8}
    requests = [make_request([5, 6, 5], seed=seed, **params) for seed in range(4)]
    requests.append(make_request([5, 6, 5], frequency_penalty=1.5))
    requests.append(make_request())
    for count in range(80):
        batch = requests if count % 5 else requests[count % 3 :][::-1]
        logits = random_logits(len(batch), vocab_size, seed=count, scale=1.0)
        for row, token_id in enumerate(sampler.sample(logits, batch).token_ids):
            wanted = reference_adjust(logits[row].numpy(), batch[row])
            assert token_id == int(np.argmax(wanted))
            batch[row].token_ids.append(token_id)


def test_logprobs_are_those_of_the_raw_logits(sample):
    logits = random_logits(4, 30)
    requests = [
        make_request(num_logprobs=2),
        make_request(temperature=1.5, seed=3, num_logprobs=0, repetition_penalty=2.0),
        make_request(),
        make_request(logit_bias={4: 100.0}, num_logprobs=5),
    ]
    output = sample(logits, requests)
    raw = torch.log_softmax(logits.double(), dim=-1)
    assert output.logprobs[2] is None
    for row, k in ((0, 2), (1, 0), (3, 5)):
        entry = output.logprobs[row]
        assert entry is not None
        assert entry.token_id == output.token_ids[row]
        assert entry.logprob == pytest.approx(raw[row, entry.token_id].item(), abs=1e-5)
        values, ids = raw[row].topk(k)
        assert [token_id for token_id, _ in entry.top] == ids.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert output.token_ids[3] == 4


def test_top_logprobs_asked_for_more_than_the_vocabulary_gives_all_of_it():
    entries = top_logprobs(torch.zeros(1, 3), [1], 10)
    assert len(entries[0].top) == 3
    assert entries[0].logprob == pytest.approx(math.log(1 / 3))
    assert top_logprobs(torch.zeros(0, 3), [], 2) == []


def test_a_stream_continues_unchanged_on_another_sampler(ops):
    vocab_size = 64
    params = {"temperature": 1.0, "seed": 2**64 - 5, "top_p": 0.9, "frequency_penalty": 0.5}

    def run(request: Request, sampler: Sampler, num_tokens: int) -> None:
        for _ in range(num_tokens):
            logits = random_logits(1, vocab_size, seed=request.num_tokens)
            request.token_ids += sampler.sample(logits, [request]).token_ids

    whole = make_request(**params)
    run(whole, Sampler(vocab_size, EOS, ops), 30)
    first = make_request(**params)
    run(first, Sampler(vocab_size, EOS, ops), 11)
    second = make_request(output=first.token_ids[2:], **params)
    run(second, Sampler(vocab_size, EOS, ops), 19)
    assert second.token_ids == whole.token_ids
