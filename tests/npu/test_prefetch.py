"""The next product's weight is on its way to the cache while attention runs."""

import pytest
import torch

from kernels.ascend.options import NpuOptions
from kernels.ascend.streams import prefetch
from kernels.npu import NpuOps
from tests.npu.decode_step import decode_step, static_batch
from tests.npu.families import family
from tests.npu.ge import GEGraph, ge_graph
from tests.npu.meta import META, Calls
from tests.npu.published import PUBLISHED

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # TorchAir's own


def graph(name: str, **options: bool) -> GEGraph:
    ops = NpuOps(device=torch.device("cpu"), options=NpuOptions(**options))
    model = family(name, ops)
    step, arguments = decode_step(model, static_batch(model, 4))
    return ge_graph(step, *arguments)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_a_graph_has_one_node_a_layer_for_it_behind_the_queries(name: str) -> None:
    with_it, without = graph(name, prefetch=True), graph(name)
    hints = with_it.of("Cmo")
    assert len(hints) == 2
    counts = with_it.counts()
    del counts["Cmo"]
    assert counts == without.counts()
    for hint in hints:
        weight, queries, *others = [node.op for node in with_it.producers(hint)]
        assert weight in ("Data", "Const", "RefData")
        assert queries not in ("Data", "Const", "RefData", "Cmo")
        assert set(others) <= {"Cmo"}  # hints stay in order


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_wheel_takes_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    config = PUBLISHED[name]
    head_dim = config.get("v_head_dim", 128)
    width = config["num_attention_heads"] * head_dim
    weight = torch.empty(config["hidden_size"], width, dtype=torch.bfloat16, device=META)
    with Calls() as calls:
        prefetch(weight, weight[:1])
    assert calls.names == {"npu_prefetch"}
