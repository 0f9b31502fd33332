"""DeepSeek's steps with drafts of its own MTP layers are replayed, with the bits of the model."""

from dataclasses import replace
from pathlib import Path

import pytest

from decoder.native_graph import NativeBackend
from engine.colocated import ColocatedEngine
from engine.models import build_model
from engine.models.decoder import DecoderForCausalLM
from engine.mtp import MTPDrafter
from engine.scheduler import SchedulerConfig
from engine.weights import load_model_config, load_weights
from kernels.ops import select_ops
from tests.decoder.checked_graphs import Maker
from tests.engine.drafted import outputs_of, requests_with
from tests.engine.mtp import tiny_mtp


@pytest.mark.parametrize(("num_layers", "num_drafts"), [(1, 1), (2, 3)])
def test_steps_with_drafts_of_mtp_layers(num_layers: int, num_drafts: int, tmp_path: Path) -> None:
    ops = select_ops("cpu")
    tiny_mtp(tmp_path, num_layers)
    config = replace(load_model_config(tmp_path), num_draft_layers=num_layers)
    model = build_model(config, ops)
    assert isinstance(model, DecoderForCausalLM)
    load_weights(tmp_path, model)
    outputs = []
    for maker in (None, Maker(NativeBackend())):
        made = ColocatedEngine(
            model,
            ops,
            num_blocks=40,
            block_size=8,
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_model_len=200, num_draft_tokens=num_drafts
            ),
            make_forward=maker,
            make_drafter=lambda made: MTPDrafter(model, made.scheduler, *made.caches, 8),
        )
        requests = requests_with(ignore_eos=True, max_tokens=20)
        made.generate(requests)
        outputs.append(outputs_of(requests))
        assert made.drafts.num_drafts > 0
        if maker is not None:
            assert maker.graphs.seqlens >= {1 + num_drafts}
            assert set(maker.graphs.stats.eager) == {"prompt tokens in the batch"}
    assert outputs[0] == outputs[1]
