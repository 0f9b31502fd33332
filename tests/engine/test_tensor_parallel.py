"""What a model cannot be split over is refused; a rank alone is spared the collectives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from engine.collectives import SingleGroup
from engine.models import build_model
from engine.parallel import Parallel
from engine.parallel_config import ParallelConfig
from engine.weights import load_model_config
from kernels.ops import select_ops
from tests.engine.rank_jobs import collectives
from tests.engine.ranks import alone
from tests.engine.tiny import tiny_hf


def test_a_rank_alone_calls_nothing(family_folder: Callable[[str], Path]) -> None:
    assert alone(collectives, family_folder("qwen3-moe")) == {}


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
        ({"tp_size": 2, "rank": 2}, r"rank is 2, tp_size \* .* is 2"),
        ({"tp_size": 2, "dp_size": 3, "ep_size": 4}, r"ep_size is 4, must divide .* = 6"),
    ],
)
def test_a_place_that_does_not_exist_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**config)
