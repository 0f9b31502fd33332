"""Models on an int8 KV cache: against transformers on dequantised keys and values, and themselves.

Tolerances. Ours and transformers' keys differ by some 1e-6 before they are rounded to 127 steps, so
about one element in 50,000 falls on the other side of a half and differs by a step, which is 1/127
of the largest number of its row. Such a step moves the logits of the tokens that see it, here by
4e-4; where there is none, they agree to 1e-5. So nine tokens of ten have to agree to 1e-4, and all
to 5e-3. An int8 cache itself moves these logits by 0.03 in the median: what attended over floats,
or over scales of other tokens, would fail for most tokens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from decoder.graph import GraphRunner
from decoder.native_graph import NativeBackend
from engine.colocated import ColocatedEngine
from engine.kv_layout import kv_layout
from engine.models import CausalLM
from engine.request import Request
from engine.runner import ForwardMemory
from engine.scheduler import SchedulerConfig
from kernels.ops import Ops, select_ops
from protos.block_hash import block_salt, hash_blocks, kv_identity
from tests.engine.hf_comparison import chunks_of_five, token_by_token, uneven, whole
from tests.engine.steps import logits_of_requests
from tests.engine.tiny import (
    PoisonedCache,
    from_hf,
    hf_logits,
    load,
    logits_by_steps,
    make_request,
    random_token_ids,
    tiny_hf_llama,
)
from tests.engine.tiny_families import tiny_deepseek, tiny_family
from tests.oracle import packaged_model_path, story

LENGTHS = (1, 31, 64, 150)
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_hf_llama,
    "mistral with a window": lambda: tiny_family("mistral", sliding_window=12),
    "qwen3": lambda: tiny_family("qwen3", head_dim=32),
}


class Int8Cache(DynamicCache):
    """transformers' cache, but what it gives back has been int8."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(_rounded(key_states), _rounded(value_states), *args, **kwargs)


def _rounded(rows: Tensor) -> Tensor:
    step = rows.abs().amax(dim=-1, keepdim=True) / 127
    return (rows / step).round() * step


@torch.inference_mode()
def int8_logits(hf: PreTrainedModel, token_ids: list[int]) -> Tensor:
    logits: Tensor = hf(torch.tensor([token_ids]), cache=Int8Cache()).logits[0]
    return logits


def assert_nearly_all_equal(ours: list[Tensor], expected: list[Tensor]) -> None:
    difference = (torch.cat(ours) - torch.cat(expected)).abs().amax(dim=-1)
    assert difference.quantile(0.9) < 1e-4
    assert difference.max() < 5e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_on_dequantised_keys_and_values(
    family: str, ops: Ops, tmp_path: Path
) -> None:
    hf = FAMILIES[family]()
    model = from_hf(hf, tmp_path, ops)
    sequences = [random_token_ids(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = [int8_logits(hf, token_ids) for token_ids in sequences]
    for take in (chunks_of_five, token_by_token) if ops.name == "cpu" else (uneven(),):
        cache = PoisonedCache(model, num_blocks=40, block_size=8, dtype="int8")
        assert_nearly_all_equal(logits_by_steps(model, cache, sequences, take), expected)
    floats = torch.cat([hf_logits(hf, token_ids) for token_ids in sequences])
    assert (floats - torch.cat(expected)).abs().amax(dim=-1).median() > 0.01


def test_latents_in_int8_give_the_reference_backends_logits(cpu: Ops, tmp_path: Path) -> None:
    """Both backends round the same latents, and transformers' floats are not far."""
    hf = tiny_deepseek("v3")
    hf.save_pretrained(tmp_path)
    token_ids = random_token_ids(90, 0)
    logits = []
    for ops in (cpu, select_ops("reference")):
        model = load(tmp_path, ops)
        cache = PoisonedCache(model, num_blocks=12, block_size=8, dtype="int8")
        logits.append(logits_by_steps(model, cache, [token_ids], chunks_of_five)[0])
    ours, expected = logits
    assert_nearly_all_equal([ours], [expected])
    assert (ours - hf_logits(hf, token_ids)).abs().max() < 0.3


def test_a_tokens_bytes_do_not_depend_on_chunks_or_batches(cpu: Ops, tmp_path: Path) -> None:
    model = from_hf(tiny_hf_llama(), tmp_path, cpu)
    token_ids, stored, logits = random_token_ids(150, 0), [], []
    for take in (whole, chunks_of_five, token_by_token, uneven()):
        request = make_request(token_ids)
        other = make_request(random_token_ids(37, 1))
        cache = PoisonedCache(model, num_blocks=30, block_size=8, dtype="int8")
        for each in (request, other):
            cache.allocate(each)
        logits.append(logits_of_requests(model, cache, [other, request], take)[1])
        stored.append(_rows(cache, request))
    for rows, found in zip(stored[1:], logits[1:], strict=True):
        assert torch.equal(found, logits[0])
        assert all(torch.equal(a, b) for a, b in zip(rows, stored[0], strict=True))


def _rows(cache: PoisonedCache, request: Request) -> list[Tensor]:
    """Values and scales of the request's tokens, of every layer."""
    return [
        part[request.block_ids].transpose(1, 2).flatten(0, 1)[: request.num_tokens]
        for caches in (cache.k_caches, cache.v_caches)
        for layer in caches
        for part in layer
    ]


def _generate(
    model: CausalLM, ops: Ops, *, num_blocks: int, has_graphs: bool = False
) -> tuple[list[list[int]], ColocatedEngine, list[GraphRunner]]:
    """Greedy tokens of five requests with a common prefix, twice."""
    runners: list[GraphRunner] = []

    def make_forward(model: CausalLM, ops: Ops, memory: ForwardMemory) -> GraphRunner:
        runners.append(GraphRunner(model, memory, NativeBackend() if has_graphs else None))
        runners[0].capture(lambda phase, progress: None)
        return runners[0]

    made = ColocatedEngine(
        model,
        ops,
        num_blocks=num_blocks,
        block_size=8,
        scheduler_config=SchedulerConfig(
            max_num_seqs=6, max_num_batched_tokens=24, max_model_len=120
        ),
        make_forward=make_forward,
        cache_dtype="int8",
    )
    prefix, outputs = random_token_ids(24, seed=0), []
    for _ in range(2):
        requests = [
            make_request(
                prefix + random_token_ids(3 + 4 * i, seed=i), max_tokens=30, ignore_eos=True
            )
            for i in range(5)
        ]
        made.generate(requests)
        outputs += [request.token_ids for request in requests]
    return outputs, made, runners


def test_tokens_do_not_depend_on_preemption_prefix_hits_or_graphs(cpu: Ops, tmp_path: Path) -> None:
    model = from_hf(tiny_hf_llama(), tmp_path, cpu)
    expected, _, _ = _generate(model, cpu, num_blocks=200)
    assert expected[:5] == expected[5:], "a warm prefix cache changed tokens"
    tokens, made, _ = _generate(model, cpu, num_blocks=20)
    assert made.scheduler.num_preemptions > 0
    assert made.block_manager.prefix_cache_hits > 0
    assert tokens == expected
    tokens, _, (graphs,) = _generate(model, cpu, num_blocks=200, has_graphs=True)
    assert graphs.stats.num_replays > 20
    assert tokens == expected


def test_the_same_tokens_have_another_hash_in_an_int8_cache(cpu: Ops, tmp_path: Path) -> None:
    model = from_hf(tiny_hf_llama(), tmp_path, cpu)
    hashes = [
        hash_blocks([1, 2, 3, 4], 2, block_salt(kv_identity("model", layout.to_proto()), "", ""))
        for layout in (kv_layout(model.config, 2, dtype=dtype) for dtype in ("float32", "int8"))
    ]
    assert not set(hashes[0]) & set(hashes[1])


def test_perplexity_of_the_packaged_model_is_within_one_percent_of_floats(cpu: Ops) -> None:
    model, token_ids = load(packaged_model_path(), cpu), story(300, seed=3)
    targets, found = torch.tensor(token_ids[1:]), []
    for dtype in ("float32", "int8"):
        cache = PoisonedCache(model, num_blocks=10, block_size=32, dtype=dtype)
        (logits,) = logits_by_steps(model, cache, [token_ids], whole)
        found.append(float(torch.nn.functional.cross_entropy(logits[:-1], targets).exp()))
    floats, int8 = found
    assert int8 != floats
    assert abs(int8 / floats - 1) < 0.01
