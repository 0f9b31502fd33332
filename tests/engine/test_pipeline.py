"""Layers spread over stages compute what one process computes, with several chunks under way."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.stages import split_layers
from tests.engine.parallel_matrix import FAMILIES
from tests.engine.ranks import Ranks, alone
from tests.engine.stage_jobs import prompt_logits, sent


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "chosen", "counts"),
    [
        (8, 4, (), [2, 2, 2, 2]),
        (7, 2, (), [3, 4]),
        (6, 4, (), [1, 1, 2, 2]),
        (7, 3, (3, 1, 3), [3, 1, 3]),
    ],
)
def test_layers_left_over_go_to_the_last_stages(
    num_layers: int, num_stages: int, chosen: tuple[int, ...], counts: list[int]
) -> None:
    stages = split_layers(num_layers, num_stages, chosen)
    assert [len(stage) for stage in stages] == counts
    assert [i for stage in stages for i in stage] == list(range(num_layers))


@pytest.mark.parametrize(
    ("num_stages", "chosen", "message"),
    [
        (5, (), "pp is 5, the model has 4 layers"),
        (2, (2, 3), r"pp_layers is \[2, 3\]: must be 2 numbers above 0, of the model's 4"),
        (2, (4, 0), r"pp_layers is \[4, 0\]"),
        (2, (4,), r"pp_layers is \[4\]"),
    ],
)
def test_layers_that_cannot_be_split_so_are_refused(
    num_stages: int, chosen: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        split_layers(4, num_stages, chosen)


# Five layers: four stages have one, one, one and two.
_SPREADS: dict[str, dict[str, Any]] = {
    "pp2": {"pp_size": 2},
    "pp2, chosen": {"pp_size": 2, "pp_layers": (4, 1)},
    "pp4": {"pp_size": 4},
    "pp2 x tp2": {"pp_size": 2, "tp_size": 2},
    "pp2 x tp2, scattered": {"pp_size": 2, "tp_size": 2, "sequence_parallel": True},
    "pp2 x tp4": {"pp_size": 2, "tp_size": 4},
    "pp4 x tp2": {"pp_size": 4, "tp_size": 2},
}
_SPARSE = {
    "pp2 x tp2 x ep2": {"pp_size": 2, "tp_size": 2, "ep_size": 2},
    "pp4 x tp2 x ep2, allreduce": {
        "pp_size": 4,
        "tp_size": 2,
        "ep_size": 2,
        "moe_comm": "allreduce",
    },
}
_QUICK = {
    "qwen2, tied": ("pp2", "pp4", "pp2 x tp2"),
    "deepseek-v3": ("pp4", "pp2 x tp2 x ep2"),
    "qwen3-moe": ("pp2", "pp4 x tp2 x ep2, allreduce"),
    "llama": ("pp2, chosen", "pp4 x tp2"),
}


def _cases() -> list[object]:
    cases = []
    for family in FAMILIES:
        is_sparse = family in ("mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3")
        for spread in _SPREADS | (_SPARSE if is_sparse else {}):
            marks = () if spread in _QUICK.get(family, ()) else pytest.mark.slow
            cases.append(pytest.param(family, spread, id=f"{family}: {spread}", marks=marks))
    return cases


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of a family."""
    folders: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in folders:
            folder = folders[family] = tmp_path_factory.mktemp("stages")
            make: Callable[..., PreTrainedModel] = FAMILIES[family]
            partial(make, num_hidden_layers=5)().save_pretrained(folder)
        return folders[family]

    return of


@pytest.fixture(scope="module")
def expected(five_layers: Callable[[str], Path]) -> Callable[[str], list[Tensor]]:
    """Logits by one process."""
    found: dict[str, list[Tensor]] = {}

    def of(family: str) -> list[Tensor]:
        if family not in found:
            found[family] = alone(prompt_logits, five_layers(family))
        return found[family]

    return of


@pytest.mark.multiprocess
@pytest.mark.parametrize(("family", "spread"), _cases())
def test_stages_have_the_logits_of_one_process(
    family: str,
    spread: str,
    five_layers: Callable[[str], Path],
    expected: Callable[[str], list[Tensor]],
    ranks: Ranks,
) -> None:
    options = (_SPREADS | _SPARSE)[spread]
    found = ranks.run(prompt_logits, five_layers(family), **options)
    for rank in range(options.get("tp_size", 1)):
        torch.testing.assert_close(found[rank], expected(family), rtol=0, atol=1e-3)


@pytest.mark.multiprocess
def test_every_stage_sends_its_rows_once(five_layers: Callable[[str], Path], ranks: Ranks) -> None:
    first, middle, last = ranks.run(sent, five_layers("llama"), pp_size=3)
    num_bytes = (1 + 17 + 33 + 9) * 64 * 4
    num_calls, num_sent = first["pp.send"]
    assert num_sent == num_bytes
    assert first.keys() == {"pp.send", "pp_back.receive"}
    assert middle == {"pp.send": (num_calls, num_bytes), "pp.receive": (num_calls, 0)}
    assert last == {"pp_back.send": (num_calls, num_bytes), "pp.receive": (num_calls, 0)}
