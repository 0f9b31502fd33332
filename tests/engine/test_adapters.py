"""LoRA adapters: each row as with a model whose weights were merged."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine.adapters import Adapters
from engine.colocated import ColocatedEngine
from engine.errors import UnsupportedModel, WeightsError
from engine.models import CausalLM, build_model
from engine.rank_adapters import RankAdapters
from engine.request import Request
from engine.scheduler import SchedulerConfig
from engine.weights import load_model_config, load_weights
from kernels.ops import Ops, select_ops
from tests.engine.adapter_files import merge, write_adapter
from tests.engine.steps import (
    PoisonedCache,
    logits_of_requests,
    make_request,
    random_token_ids,
)
from tests.engine.tiny import hf_logits, tiny_hf_llama
from tests.engine.tiny_families import tiny_deepseek, tiny_family

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=200)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], tuple[str, ...]]] = {
    "llama": (tiny_hf_llama, (*ATTENTION, "gate_proj", "up_proj", "down_proj")),
    "qwen3-moe": (lambda: tiny_family("qwen3-moe"), ATTENTION),
    "deepseek-v3": (
        lambda: tiny_deepseek("v3"),
        ("q_a_proj", "kv_b_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    ),
}


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops("auto")


def load(hf: PreTrainedModel, folder: Path, ops: Ops) -> CausalLM:
    hf.save_pretrained(folder)
    model = build_model(load_model_config(folder), ops)
    load_weights(folder, model)
    return model


def engine(model: CausalLM, ops: Ops, adapters: Adapters) -> ColocatedEngine:
    return ColocatedEngine(
        model,
        ops,
        num_blocks=60,
        block_size=8,
        scheduler_config=CONFIG,
        adapters=adapters,
    )


def assert_greedy(hf: PreTrainedModel, request: Request) -> None:
    start = request.num_prompt_tokens
    logits = hf_logits(hf, request.token_ids)[start - 1 : -1]
    output = torch.tensor(request.token_ids[start:])
    chosen = logits[torch.arange(len(output)), output]
    assert (logits.amax(dim=-1) - chosen).max() < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_two_adapters_and_the_base_in_one_batch_equal_their_merged_models(
    family: str, ops: Ops, tmp_path: Path
) -> None:
    make, targets = FAMILIES[family]
    hf = make()
    adapters = Adapters(RankAdapters(model := load(hf, tmp_path / "model", ops)))
    deltas = {"": {}} | {
        "red": write_adapter(tmp_path / "red", hf, targets, seed=1),
        "blue": write_adapter(tmp_path / "blue", hf, targets[:2], seed=2, use_rslora=True),
    }
    for name in ("red", "blue"):
        adapters.load(name, tmp_path / name)
    requests = []
    for i, length in enumerate((1, 9, 40)):
        for name in deltas:
            # The same prompts for all three, so that a prefix shared by mistake would show.
            request = make_request(random_token_ids(length, seed=i), max_tokens=12, ignore_eos=True)
            request.request_id = f"{i}-{name}"
            request.adapter = adapters.key(name) if name else ""
            request.cache_salt = request.adapter
            requests.append(request)
    engine(model, ops, adapters).generate(requests)
    for name, added in deltas.items():
        merge(hf, added, 1)
        for request in requests:
            if request.adapter.partition("@")[0] == name:
                assert_greedy(hf, request)
        merge(hf, added, -1)
    by_adapter = {
        name: [r.token_ids for r in requests if r.adapter.partition("@")[0] == name]
        for name in deltas
    }
    assert by_adapter[""] != by_adapter["red"] != by_adapter["blue"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_in_any_batch(family: str, tmp_path: Path) -> None:
    make, targets = FAMILIES[family]
    hf = make()
    adapters = Adapters(RankAdapters(model := load(hf, tmp_path / "model", select_ops("cpu"))))
    for name, seed in (("red", 1), ("blue", 2)):
        write_adapter(tmp_path / name, hf, targets, seed=seed)
        adapters.load(name, tmp_path / name)

    def requests() -> list[Request]:
        made = [make_request(random_token_ids(n, seed=n)) for n in (1, 7, 8, 9, 23, 40, 90)]
        for i, request in enumerate(made):
            request.adapter = adapters.key(("red", "blue")[i % 2])
        return made

    def logits_of(group: Sequence[Request], take: int) -> list[torch.Tensor]:
        cache = PoisonedCache(model, num_blocks=40, block_size=8)
        for request in group:
            cache.allocate(request)
        return logits_of_requests(model, cache, group, lambda i, left: take, adapters=adapters)

    alone = [logits_of([request], 90)[0] for request in requests()]
    for take in (1, 9, 20, 90):
        for found, expected in zip(logits_of(requests(), take), alone, strict=True):
            assert torch.equal(found, expected), take


@pytest.fixture
def llama(ops: Ops, tmp_path: Path) -> tuple[PreTrainedModel, Adapters, Path]:
    hf = tiny_hf_llama()
    return hf, Adapters(RankAdapters(load(hf, tmp_path / "model", ops))), tmp_path


def test_another_adapter_of_the_same_name_has_another_identity(
    llama: tuple[PreTrainedModel, Adapters, Path],
) -> None:
    hf, adapters, folder = llama
    write_adapter(folder / "one", hf, ("q_proj",), seed=1)
    write_adapter(folder / "two", hf, ("q_proj",), seed=2)
    adapters.load("mine", folder / "one")
    first = adapters.key("mine")
    adapters.load("mine", folder / "two")
    assert adapters.key("mine") != first
    adapters.load("mine", folder / "one")
    assert adapters.key("mine") == first
    adapters.unload("mine")
    adapters.free([])
    with pytest.raises(ValueError, match="adapter 'mine' is not loaded; loaded: none"):
        adapters.key("mine")


def test_a_request_keeps_the_adapter_it_began_with(
    llama: tuple[PreTrainedModel, Adapters, Path], ops: Ops
) -> None:
    hf, _, folder = llama
    old, new = (
        write_adapter(folder / name, hf, ("q_proj", "up_proj"), seed=seed)
        for name, seed in (("old", 1), ("new", 2))
    )
    model = load(hf, folder / "again", ops)
    adapters = Adapters(RankAdapters(model))
    adapters.load("mine", folder / "old")
    made = engine(model, ops, adapters)
    requests = []
    for i in range(2):
        request = make_request(random_token_ids(20, seed=i), max_tokens=24, ignore_eos=True)
        request.adapter = request.cache_salt = adapters.key("mine")
        made.scheduler.add(request)
        requests.append(request)
        for _ in range(5):
            made.step()
        if i == 0:
            adapters.load("mine", folder / "new")
        adapters.free({r.adapter for r in requests})
    adapters.unload("mine")
    while made.scheduler.has_work:
        made.step()
    for request, deltas in zip(requests, (old, new), strict=True):
        merge(hf, deltas, 1)
        assert_greedy(hf, request)
        merge(hf, deltas, -1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora is True in .*, not supported"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ],
)
def test_an_option_that_changes_the_maths_is_refused(
    llama: tuple[PreTrainedModel, Adapters, Path], options: dict[str, Any], message: str
) -> None:
    hf, adapters, folder = llama
    write_adapter(folder / "one", hf, ("q_proj",), seed=1, **options)
    with pytest.raises(UnsupportedModel, match=message):
        adapters.load("one", folder / "one")
    assert not adapters.names


def test_weights_that_do_not_fit_are_named(llama: tuple[PreTrainedModel, Adapters, Path]) -> None:
    hf, adapters, folder = llama
    write_adapter(folder / "one", hf, ("q_proj",), seed=1)
    path = folder / "one" / "adapter_model.safetensors"
    good = load_file(path)
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    for change, error, message in (
        ({key.format("A"): torch.zeros(4, 63)}, WeightsError, r"is no weight \[64, 64\]"),
        ({key.format("B"): None}, WeightsError, "but no .*q_proj.lora_B.weight"),
        (
            {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)},
            UnsupportedModel,
            "lm_head.lora_A.weight .* no projection here takes an adapter",
        ),
    ):
        tensors = good | change
        save_file({k: v for k, v in tensors.items() if v is not None}, path)
        with pytest.raises(error, match=message):
            adapters.load("one", folder / "one")
    path.write_bytes(b"nothing")
    with pytest.raises(WeightsError, match="cannot be read"):
        adapters.load("one", folder / "one")
