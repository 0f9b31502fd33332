"""One operator before latent attention: the tokens, the shapes and the graph of it."""

import pytest
import torch

import tests.npu.simulator
from engine.checkpoint.config import parse_model_config
from engine.layers.layer import pack_weights
from engine.models import build_model
from kernels.ascend.options import NpuOptions
from kernels.npu import NpuOps
from kernels.reference import ReferenceOps
from tests.npu.decode_step import decode_step, static_batch
from tests.npu.families import family, generate
from tests.npu.ge import ge_graph
from tests.npu.meta import META, Calls, meta_batch
from tests.npu.published import DEEPSEEK_V3, one_rank
from tests.npu.tokens import npu_ops, prompts

assert tests.npu.simulator  # gives the NPU's operators CPU kernels
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # TorchAir's own
# The operator takes these widths and no others.
WIDTHS = {"hidden_size": 7168, "q_lora_rank": 1536, "num_hidden_layers": 2}
PROLOG = "npu_mla_prolog_v2"
PARTS = {"npu_interleave_rope", "npu_kv_rmsnorm_rope_cache"}


def test_tokens_are_those_of_the_reference() -> None:
    lengths = prompts(5, 130)
    expected, _ = generate(family("deepseek_v3", ReferenceOps(), **WIDTHS), lengths, 6)
    with Calls() as calls:
        tokens, _ = generate(family("deepseek_v3", npu_ops(), **WIDTHS), lengths, 6)
    assert tokens == expected
    # Prompts go the other way.
    assert {PROLOG, *PARTS} <= calls.names


@torch.inference_mode()
@pytest.mark.usefixtures("all_shapes")
@pytest.mark.parametrize("tp_size", [1, 4, 8])
@pytest.mark.parametrize("mla_prolog", [True, False])
def test_the_wheel_takes_the_call_for_deepseek_v3(tp_size: int, mla_prolog: bool) -> None:
    config = parse_model_config(DEEPSEEK_V3 | {"num_hidden_layers": 1})
    with META:
        ops = NpuOps(device=META, options=NpuOptions(mla_prolog=mla_prolog))
        model = build_model(config, ops, one_rank(tp_size))
        pack_weights(model)
    kv = meta_batch(model, tp_size, [1] * 32, [100] * 32)
    token_ids = torch.zeros(32, dtype=torch.int32, device=META)
    with Calls() as calls:
        hidden = model(token_ids, token_ids, kv)
    assert (hidden.shape, hidden.dtype) == ((32, 7168), torch.bfloat16)
    assert (PROLOG in calls.names) == mla_prolog
    assert PARTS.isdisjoint(calls.names) == mla_prolog


def test_a_graph_has_one_node_for_it_and_copies_no_cache() -> None:
    model = family("deepseek_v3", NpuOps(device=torch.device("cpu")), **WIDTHS)
    step, arguments = decode_step(model, static_batch(model, 4))
    graph = ge_graph(step, *arguments)
    assert graph.count("MlaPrologV2") == 2
    assert graph.count("KvRmsNormRopeCache", "InterleaveRope", "TensorMove") == 0


@pytest.mark.parametrize(
    "changed", [{"hidden_size": 512}, {"q_lora_rank": 768}, {"attention_bias": True}]
)
def test_other_models_go_operator_by_operator(changed: dict[str, int]) -> None:
    options = {"hidden_size": 7168, "q_lora_rank": 1536, "num_hidden_layers": 1} | changed
    config = parse_model_config(DEEPSEEK_V3 | options)
    with META:
        model = build_model(config, NpuOps(device=META))
        pack_weights(model)
    assert model.model.layers[0].self_attn._prolog is None
