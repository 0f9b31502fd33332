"""DeepSeek's MTP layers: their drafts are those of transformers, and change no token."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from engine.colocated import ColocatedEngine
from engine.models import build_model
from engine.models.decoder import DecoderForCausalLM
from engine.mtp import MTPDrafter
from engine.scheduler import SchedulerConfig
from engine.weights import load_model_config, load_weights
from kernels.ops import Ops, select_ops
from tests.engine.drafted import outputs_of, requests_with
from tests.engine.mtp import tiny_mtp
from tests.engine.steps import make_request, random_token_ids


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select_ops("auto")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, MtpModel, Path]:
    folder = tmp_path_factory.mktemp("mtp")
    return *tiny_mtp(folder), folder


def load(folder: Path, ops: Ops, *, num_draft_layers: int) -> DecoderForCausalLM:
    config = replace(load_model_config(folder), num_draft_layers=num_draft_layers)
    model = build_model(config, ops)
    load_weights(folder, model)
    return model


def config(num_drafts: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=48, max_model_len=200, num_draft_tokens=num_drafts
    )


def engine(
    model: DecoderForCausalLM,
    ops: Ops,
    num_drafts: int,
    num_blocks: int = 40,
    block_size: int = 8,
) -> ColocatedEngine:
    def drafter(made: ColocatedEngine) -> MTPDrafter:
        return MTPDrafter(model, made.scheduler, *made.caches, block_size)

    return ColocatedEngine(
        model,
        ops,
        num_blocks=num_blocks,
        block_size=block_size,
        scheduler_config=config(num_drafts),
        make_drafter=drafter if num_drafts else None,
    )


@torch.inference_mode()
def hf_drafts(hf: PreTrainedModel, mtp: MtpModel, token_ids: list[int]) -> list[int]:
    """For every token but the last: the draft of the token after the next."""
    hidden = hf.model(torch.tensor([token_ids])).last_hidden_state[:, :-1]
    states = mtp.forward_layer(
        0,
        hidden,
        torch.arange(1, len(token_ids))[None],
        MtpCache(config=hf.config.get_mtp_config()),
        input_ids=torch.tensor([token_ids[1:]]),
    )
    drafts: list[int] = hf.lm_head(states)[0].argmax(dim=-1).tolist()
    return drafts


@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 8, 40, 100])
def test_the_first_draft_is_that_of_transformers_in_every_step(
    num_prompt_tokens: int, hf: tuple[PreTrainedModel, MtpModel, Path], ops: Ops
) -> None:
    main, mtp, folder = hf
    made = engine(load(folder, ops, num_draft_layers=1), ops, num_drafts=2)
    request = make_request(random_token_ids(num_prompt_tokens, seed=3), max_tokens=24)
    made.scheduler.add(request)
    drafts = {}
    while made.scheduler.has_work:
        made.step()
        if request.draft_token_ids:
            drafts[request.num_tokens] = request.draft_token_ids[0]
    assert len(drafts) > 10
    expected = hf_drafts(main, mtp, request.token_ids)
    assert drafts == {n: expected[n - 2] for n in drafts}


@pytest.mark.parametrize(
    ("num_drafts", "options", "num_blocks"),
    [(1, {}, 40), (3, {"temperature": 1.0}, 40), (3, {}, 12)],
    ids=["one", "three, sampled", "three, with preemption"],
)
def test_tokens_are_those_without_drafts(
    num_drafts: int,
    options: dict[str, float],
    num_blocks: int,
    hf: tuple[PreTrainedModel, MtpModel, Path],
    ops: Ops,
) -> None:
    _, _, folder = hf
    plain, drafted = (requests_with(**options) for _ in range(2))
    engine(load(folder, ops, num_draft_layers=0), ops, 0).generate(plain)
    made = engine(load(folder, ops, num_draft_layers=1), ops, num_drafts, num_blocks)
    made.generate(drafted)
    assert outputs_of(drafted) == outputs_of(plain)
    assert made.drafts.num_drafts > 50
    made.block_manager.check_integrity([])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, MtpModel, Path]:
    """With three MTP layers."""
    folder = tmp_path_factory.mktemp("mtp3")
    return *tiny_mtp(folder, 3), folder


@torch.inference_mode()
def hf_drafts_of_all_layers(hf: PreTrainedModel, mtp: MtpModel, token_ids: list[int]) -> list[int]:
    """One of each layer, all computed from scratch."""
    hidden = hf.model(torch.tensor([token_ids])).last_hidden_state[:, :-1]
    drafts, _, _ = mtp(
        input_ids=torch.tensor([token_ids[1:]]),
        last_hidden_states=hidden,
        attention_mask=None,
        position_ids=torch.arange(1, len(token_ids))[None],
        mtp_cache=MtpCache(config=hf.config.get_mtp_config()),
    )
    found: list[int] = drafts[0].tolist()
    return found


@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 30, 100])
def test_every_layer_drafts_what_it_drafts_in_transformers(
    num_prompt_tokens: int, three: tuple[PreTrainedModel, MtpModel, Path], ops: Ops
) -> None:
    """Chunks of 48 tokens; every draft is wrong, so that each leaves KV to be computed anew."""
    main, mtp, folder = three
    made = engine(load(folder, ops, num_draft_layers=3), ops, num_drafts=3, block_size=128)
    request = make_request(random_token_ids(num_prompt_tokens, seed=3), max_tokens=16)
    made.scheduler.add(request)
    compared = 0
    while made.scheduler.has_work:
        made.step()
        if len(request.draft_token_ids) == 3:
            compared += 1
            assert request.draft_token_ids == hf_drafts_of_all_layers(main, mtp, request.token_ids)
    assert compared > 8


@pytest.mark.parametrize(
    ("num_layers", "num_drafts", "options", "num_blocks"),
    [(2, 2, {}, 40), (3, 5, {"temperature": 1.0}, 40), (3, 3, {}, 12)],
    ids=["two of three layers", "more drafts than layers, sampled", "with preemption"],
)
def test_tokens_are_those_without_drafts_whatever_the_number_of_layers(
    num_layers: int,
    num_drafts: int,
    options: dict[str, float],
    num_blocks: int,
    three: tuple[PreTrainedModel, MtpModel, Path],
    ops: Ops,
) -> None:
    _, _, folder = three
    plain, drafted = (requests_with(**options) for _ in range(2))
    engine(load(folder, ops, num_draft_layers=0), ops, 0).generate(plain)
    model = load(folder, ops, num_draft_layers=num_layers)
    made = engine(model, ops, num_drafts, num_blocks)
    made.generate(drafted)
    assert outputs_of(drafted) == outputs_of(plain)
    assert made.drafts.num_drafts > 50
    made.block_manager.check_integrity([])
