"""A model split over processes computes what one process computes."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.collectives import SingleGroup
from engine.models import build_model
from engine.parallel import Parallel
from engine.parallel_config import ParallelConfig
from engine.weights import load_model_config
from kernels.ops import select_ops
from tests.engine.rank_jobs import collectives, logits
from tests.engine.ranks import Ranks, alone
from tests.engine.test_deepseek import tiny_deepseek
from tests.engine.tiny import tiny_hf

pytestmark = pytest.mark.multiprocess

_MOE = {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
# Four query heads over two KV heads: TP 4 holds every KV head twice. A vocabulary of 95 leaves the
# last rank fewer rows than the others.
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": partial(
        tiny_hf, LlamaForCausalLM, LlamaConfig, vocab_size=95, attention_bias=True, mlp_bias=True
    ),
    "qwen2, tied": partial(
        tiny_hf, Qwen2ForCausalLM, Qwen2Config, vocab_size=95, tie_word_embeddings=True
    ),
    "qwen3": partial(tiny_hf, Qwen3ForCausalLM, Qwen3Config, vocab_size=95, head_dim=16),
    "qwen3-moe": partial(
        tiny_hf, Qwen3MoeForCausalLM, Qwen3MoeConfig, vocab_size=95, mlp_only_layers=[0], **_MOE
    ),
    "deepseek-v2": partial(tiny_deepseek, "v2", vocab_size=95, q_lora_rank=None),
    "deepseek-v3": partial(tiny_deepseek, "v3", vocab_size=95),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    FAMILIES[request.param]().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {"tp_size": 2},
        {"tp_size": 4},
        {"tp_size": 2, "sequence_parallel": True},
        {"tp_size": 4, "sequence_parallel": True},
    ],
    ids=["tp2", "tp4", "tp2 scattered", "tp4 scattered"],
)
def test_every_rank_has_the_logits_of_one_process(
    config: dict[str, Any], folder: Path, ranks: Ranks
) -> None:
    expected = alone(logits, folder)
    for found in ranks.run(logits, folder, **config):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_a_rank_alone_calls_nothing(folder: Path) -> None:
    assert alone(collectives, folder) == {}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tp_size": 3}, "num_heads is 4, not a multiple of tp_size 3"),
        ({"tp_size": 2, "ep_size": 2}, "ep_size is 2, the model has no experts"),
    ],
)
def test_what_cannot_be_split_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny_hf(LlamaForCausalLM, LlamaConfig).save_pretrained(tmp_path)
    group = SingleGroup()
    group.size = config["tp_size"]
    parallel = Parallel(config=ParallelConfig(**config), tp=group)
    with pytest.raises(ValueError, match=message):
        build_model(load_model_config(tmp_path), select_ops("reference"), parallel)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tp_size": 2, "rank": 2}, r"rank is 2, tp_size \* dp_size is 2"),
        ({"tp_size": 2, "dp_size": 3, "ep_size": 4}, r"ep_size is 4, must divide .* = 6"),
    ],
)
def test_a_place_that_does_not_exist_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**config)
