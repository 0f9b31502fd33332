"""What is asked of a configuration before anything runs is what building the model would say."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.collectives import SingleGroup
from engine.config import ModelConfig
from engine.errors import UnsupportedModel
from engine.fit import linear_names, rank_problems, with_draft_layers
from engine.kv_layout import kv_layout, max_block_bytes
from engine.layers.linear import FusedLinear
from engine.models import build_model
from engine.parallel import Parallel
from engine.parallel_config import EplbConfig, ParallelConfig
from engine.weights import load_model_config
from kernels.ops import select_ops
from tests.engine.parallel_matrix import FAMILIES


@pytest.fixture(params=FAMILIES)
def config(request: pytest.FixtureRequest, family_folder: Callable[[str], Path]) -> ModelConfig:
    return load_model_config(family_folder(request.param))


def group_of(size: int) -> SingleGroup:
    group = SingleGroup()
    group.size = size
    return group


def refusal(config: ModelConfig, parallel: ParallelConfig) -> str:
    """What building the first rank's part says against it; empty: nothing."""
    place = Parallel(config=parallel, tp=group_of(parallel.tp_size), ep=group_of(parallel.ep_size))
    try:
        build_model(config, select_ops("reference"), place)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("ep_size", [1, 2, 3, 6])
def test_a_model_is_refused_for_what_its_parts_would_be_refused_for(
    config: ModelConfig, tp_size: int, ep_size: int
) -> None:
    parallel = ParallelConfig(tp_size=tp_size, dp_size=ep_size, ep_size=ep_size)
    assert bool(rank_problems(config, parallel)) == bool(refusal(config, parallel))


@pytest.mark.parametrize("layers", [(), (1, 1), (1, 2), (2,)])
@pytest.mark.parametrize("pp_size", [1, 2, 3])
def test_stages_are_refused_as_the_model_would_be(
    config: ModelConfig, pp_size: int, layers: tuple[int, ...]
) -> None:
    parallel = ParallelConfig(pp_size=pp_size, pp_layers=layers)
    assert rank_problems(config, parallel).get("pp", "") == refusal(config, parallel)


@pytest.mark.parametrize("name", ["o_projj", "o_proj", "gate_proj", "gate"])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_layer_sharding_is_refused_by_name_and_ranks(
    config: ModelConfig, name: str, dp_size: int
) -> None:
    parallel = ParallelConfig(tp_size=2, dp_size=dp_size, layer_sharding=(name,))
    problem = rank_problems(config, parallel).get("layer_sharding", "")
    if name not in linear_names(config):
        assert problem.startswith(f"layer_sharding names {name}: the model has ")
    elif dp_size == 1 and (name == "o_proj" or (name == "gate_proj" and has_dense(config))):
        assert "takes dp or cp above 1" in problem
    else:
        assert not problem


def has_dense(config: ModelConfig) -> bool:
    return any(config.moe is None or i not in config.moe.layers for i in range(config.num_layers))


def test_the_linears_that_may_be_sharded_are_the_models(config: ModelConfig) -> None:
    paths = {
        path.rpartition(".")[2]: module
        for path, module in build_model(config, select_ops("reference")).named_modules()
        if isinstance(module, FusedLinear) and ".layers." in path
    }
    assert set(linear_names(config)) == paths.keys() | {
        name for module in paths.values() for name in module.names
    }


@pytest.mark.parametrize(
    ("eplb", "setting", "message"),
    [
        ({"mode": "dynamic", "num_redundant_experts": 5}, "ep", "not a multiple of ep_size 2"),
        ({"mode": "dynamic", "num_redundant_experts": 10}, "ep", "is 10, at most 8"),
        ({"heat_file": "none/heat.json"}, "eplb", "none/heat.json: its folder does not exist"),
        ({"mode": "static", "file": "none.json"}, "eplb", "No such file"),
        ({"mode": "static", "file": "file.json"}, "eplb", "has no layers"),
    ],
)
def test_balancing_that_does_not_go_with_the_experts_is_refused(
    eplb: dict[str, Any],
    setting: str,
    message: str,
    family_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.json").write_text(json.dumps({"heat": {}}))
    config = load_model_config(family_folder("qwen3-moe"))
    parallel = ParallelConfig(dp_size=2, ep_size=2, eplb=EplbConfig(**eplb))
    found = rank_problems(config, parallel)
    assert found.keys() == {setting}
    assert message in found[setting]
    assert ("eplb" in found) != (rank_problems(config, parallel, reads_files=False) == found)


def test_drafts_of_the_model_take_layers_that_it_has(config: ModelConfig) -> None:
    plain = replace(config, num_mtp_layers=0)
    assert with_draft_layers(plain, "ngram", 3) == plain
    with pytest.raises(UnsupportedModel, match="speculation is mtp, but the model has no MTP"):
        with_draft_layers(plain, "mtp", 3)
    two = replace(config, num_mtp_layers=2)
    assert [with_draft_layers(two, "mtp", n).num_draft_layers for n in (1, 2, 3)] == [1, 2, 2]


def test_a_block_takes_as_much_as_on_the_rank_with_most_layers(config: ModelConfig) -> None:
    three = replace(config, num_layers=3)
    ranks = [
        kv_layout(three, 8, ParallelConfig(tp_size=2, pp_size=2, rank=rank), "int8")
        for rank in range(4)
    ]
    found = max_block_bytes(three, 8, ParallelConfig(tp_size=2, pp_size=2), "int8")
    assert found == max(layout.block_bytes_all_layers for layout in ranks)
