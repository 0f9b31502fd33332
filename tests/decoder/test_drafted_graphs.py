"""Steps with drafts are replayed from the graphs of other steps, whatever each sequence has."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from decoder.native_graph import NativeBackend
from engine.batch import BatchBuilder
from engine.colocated import ColocatedEngine
from engine.kv_caches import poisoned_caches
from engine.kv_layout import kv_layout
from engine.models import CausalLM
from engine.ngram import NgramDrafter
from engine.runner import ForwardMemory
from engine.scheduler_output import ScheduledRequest
from engine.speculation import ComputedRows
from kernels.ops import Ops, select_ops
from tests.decoder.checked_graphs import CheckedGraphs, Maker
from tests.engine.drafted import (
    CONFIG,
    NUM_DRAFTS,
    OftenRight,
    engine_with,
    outputs_of,
    requests_with,
)
from tests.engine.tiny import from_hf, make_request, random_token_ids, tiny_hf, tiny_hf_llama
from tests.engine.tiny_families import tiny_deepseek


class FewSizes(NativeBackend):
    """Graphs for 3 and 11 rows only, so that most batches are padded and some are too large."""

    def batch_sizes(self, max_num_rows: int) -> Sequence[int]:
        return (3, 11)


class Uneven(OftenRight):
    """Drafts another number of tokens each time."""

    def propose(self, computed: Sequence[ComputedRows], hidden: Tensor, on_layer: object) -> None:
        super().propose(computed, hidden, on_layer)
        for rows in computed:
            del rows.request.draft_token_ids[self._random.randrange(NUM_DRAFTS + 1) :]


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops("cpu")


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_hf_llama,
    "window": lambda: tiny_hf(MistralForCausalLM, MistralConfig, sliding_window=20),
    "latent attention": lambda: tiny_deepseek("v3", first_k_dense_replace=2),
    "latent attention as in Lite": lambda: tiny_deepseek(
        "v2", q_lora_rank=None, v_head_dim=40, first_k_dense_replace=2
    ),
    "experts": lambda: tiny_hf(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        num_experts=10,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
    ),
    "experts in groups": lambda: tiny_deepseek("v3", n_routed_experts=16, n_shared_experts=2),
    "experts of the best groups": lambda: tiny_deepseek("v2", first_k_dense_replace=0),
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def model(
    request: pytest.FixtureRequest, ops: Ops, tmp_path_factory: pytest.TempPathFactory
) -> CausalLM:
    return from_hf(request.param(), tmp_path_factory.mktemp("model"), ops)


@pytest.mark.parametrize("cache_dtype", ["float32", "int8"])
@pytest.mark.parametrize("num_blocks", [40, 12], ids=["room", "preemption"])
@pytest.mark.parametrize("backend_class", [NativeBackend, FewSizes])
def test_every_drafted_step_has_the_bits_of_the_eager_model(
    backend_class: type[NativeBackend],
    num_blocks: int,
    cache_dtype: str,
    model: CausalLM,
    ops: Ops,
) -> None:
    plain = requests_with(ignore_eos=True)
    engine_with(model, ops).generate(plain)
    expected = outputs_of(plain)
    backend = backend_class()
    maker = Maker(backend)
    made = ColocatedEngine(
        model,
        ops,
        num_blocks=num_blocks,
        block_size=8,
        scheduler_config=CONFIG,
        make_forward=maker,
        make_drafter=lambda made: Uneven(made.scheduler, expected),
        cache_dtype=cache_dtype,
    )
    drafted = requests_with(ignore_eos=True)
    made.generate(drafted)
    if cache_dtype == "float32":
        assert outputs_of(drafted) == expected
        assert 0 < made.drafts.num_accepted < made.drafts.num_drafts
    graphs = maker.graphs
    assert graphs.seqlens >= set(range(1, 2 + NUM_DRAFTS))
    assert len(graphs.replayed) >= 5
    if backend_class is FewSizes:
        assert {size for _, size in graphs.replayed} == {3, 11}
        assert any(rows < size for rows, size in graphs.replayed)
    assert (made.scheduler.num_preemptions > 0) == (num_blocks == 12)
    stats = graphs.stats
    assert stats.num_replays > 10
    assert (stats.num_recompiles, stats.num_graphs) == (0, backend.num_compiles)
    assert stats.num_graph_bytes == backend.num_bytes > 0
    too_large = {"batch is too large"} if backend_class is FewSizes else set()
    assert set(stats.eager) <= {"prompt tokens in the batch"} | too_large


def test_graphs_hold_every_draft_of_every_sequence(model: CausalLM, ops: Ops) -> None:
    maker = Maker(NativeBackend())
    prompt = random_token_ids(6, seed=1) * 4
    made = ColocatedEngine(
        model,
        ops,
        num_blocks=120,
        block_size=8,
        scheduler_config=CONFIG,
        make_forward=maker,
        make_drafter=lambda made: NgramDrafter(made.scheduler),
    )
    made.generate([make_request(prompt[i:], max_tokens=60, ignore_eos=True) for i in range(8)])
    assert made.drafts.num_drafts > 0
    assert set(maker.graphs.stats.eager) == {"prompt tokens in the batch"}
    assert maker.graphs.stats.num_replays > 20


@pytest.mark.parametrize(
    ("seqlens", "size"),
    [([1], 2), ([8], 8), ([1, 1, 1], 8), ([8, 1, 3], 12), ([4, 4, 4], 12), ([2, 8, 3], 16)],
)
def test_padding_and_short_tables_do_not_matter(
    seqlens: list[int], size: int, model: CausalLM, ops: Ops
) -> None:
    """A graph is replayed with another batch in between, whose remains must not show."""
    k_caches, v_caches = poisoned_caches(kv_layout(model.config, 8), 24)
    for cache in (*k_caches, *v_caches):
        assert isinstance(cache, torch.Tensor), "caches are in floats"
        cache.normal_()
    memory = ForwardMemory(k_caches, v_caches, 4, 12, num_draft_tokens=3)
    graphs = CheckedGraphs(model, memory, _Only(2, 8, 12, 16))
    graphs.capture(lambda phase, progress: None)
    builder = BatchBuilder(k_caches, v_caches, 8)
    other = [_entry(90, 4, range(12)), _entry(50, 8, range(12, 19))]
    wanted = [_entry(9 + 7 * i, n, (23 - 3 * i, 20 - i, 7 + i)) for i, n in enumerate(seqlens)]
    with torch.inference_mode():
        graphs(builder.build(other))
        graphs(builder.build(wanted))
    assert graphs.replayed == {(12, 12), (sum(seqlens), size)}


class _Only(NativeBackend):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self._only = sizes

    def batch_sizes(self, max_num_rows: int) -> Sequence[int]:
        return self._only


def _entry(num_tokens: int, count: int, block_ids: Sequence[int]) -> ScheduledRequest:
    """The last `count` of so many tokens."""
    request = make_request(random_token_ids(num_tokens, seed=num_tokens))
    request.block_ids = list(block_ids)
    request.num_computed_tokens = num_tokens - count
    return ScheduledRequest(request, count)
