"""A model spread over processes computes what one process computes, whatever the spread: prompts
and decode steps, uneven batches, ranks without work.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.engine.adapter_files import write_adapter
from tests.engine.gguf_files import tiny_gguf
from tests.engine.mtp import tiny_mtp
from tests.engine.parallel_matrix import (
    DENSE,
    FAMILIES,
    QUICK_DENSE,
    QUICK_SPARSE,
    SPARSE,
    Spread,
    all_spreads,
)
from tests.engine.quantized_files import write_quantized
from tests.engine.rank_jobs import ROUNDS, adapter_logits, draft_states, greedy, part_logits
from tests.engine.ranks import Ranks, alone

pytestmark = pytest.mark.multiprocess

_QUICK_FAMILIES = ("llama", "qwen2, tied", "qwen3-moe", "deepseek-v3")


def _cases() -> list[object]:
    cases = []
    for family in FAMILIES:
        quick = QUICK_DENSE if family in DENSE else QUICK_SPARSE
        for spread in all_spreads(is_sparse=family in SPARSE):
            is_quick = family in _QUICK_FAMILIES and spread in quick
            marks = () if is_quick else pytest.mark.slow
            cases.append(pytest.param(family, spread, id=f"{family}: {spread}", marks=marks))
    return cases


@pytest.fixture(scope="module")
def expected(family_folder: Callable[[str], Path]) -> Callable[[str], list[tuple]]:
    """Of every data-parallel rank, by one process."""
    found: dict[str, list[tuple]] = {}

    def of(family: str) -> list[tuple]:
        if family not in found:
            folder = family_folder(family)
            num_ranks = len(ROUNDS[0])
            found[family] = [alone(greedy, folder, dp_rank) for dp_rank in range(num_ranks)]
        return found[family]

    return of


@pytest.mark.parametrize(("family", "spread"), _cases())
def test_every_rank_has_the_logits_and_tokens_of_one_process(
    family: str,
    spread: Spread,
    family_folder: Callable[[str], Path],
    expected: Callable[[str], list[tuple]],
    ranks: Ranks,
) -> None:
    found = ranks.run(greedy, family_folder(family), **spread.options)
    assert len(found) == spread.tp_size * spread.dp_size
    for rank, (logits, token_ids) in enumerate(found):
        expected_logits, expected_token_ids = expected(family)[rank // spread.tp_size]
        assert token_ids == expected_token_ids
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("form", "quantization"),
    [
        *product(("awq", "gptq", "modelslim", "gguf"), ("none", "native")),
        ("fp8", "none"),
        ("gptq, desc_act", "none"),
    ],
)
def test_every_rank_reads_its_part_of_a_quantised_weight(
    form: str, quantization: str, ranks: Ranks, tmp_path: Path
) -> None:
    path = tmp_path
    if form == "gguf":
        path = tmp_path / "tiny.gguf"
        # Of 128 inputs both ranks have whole blocks, of 96 they do not.
        tiny_gguf(path, GGMLQuantizationType.Q4_1, hidden_size=128)
    else:
        write_quantized(path, form)
    expected = alone(part_logits, path, "none")
    for found in ranks.run(part_logits, path, quantization, tp_size=2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


_ADAPTED = {
    "qwen2, tied": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3-moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "deepseek-v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
}


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("family", _ADAPTED)
def test_every_rank_adds_its_part_of_an_adapter(
    family: str,
    tp_size: int,
    family_folder: Callable[[str], Path],
    ranks: Ranks,
    tmp_path: Path,
) -> None:
    folder, adapter = family_folder(family), tmp_path / "adapter"
    write_adapter(adapter, FAMILIES[family](), _ADAPTED[family], seed=1)
    expected = alone(adapter_logits, folder, adapter)
    for found in ranks.run(adapter_logits, folder, adapter, tp_size=tp_size):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "spread",
    [
        Spread(tp_size=2),
        Spread(tp_size=2, sequence_parallel=True),
        Spread(tp_size=2, ep_size=2),
        Spread(tp_size=2, ep_size=2, moe_comm="allreduce"),
    ],
    ids=str,
)
def test_every_rank_has_the_draft_states_of_one_process(
    spread: Spread, ranks: Ranks, tmp_path: Path
) -> None:
    tiny_mtp(tmp_path, 2)
    expected = alone(draft_states, tmp_path)
    for found in ranks.run(draft_states, tmp_path, **spread.options):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
